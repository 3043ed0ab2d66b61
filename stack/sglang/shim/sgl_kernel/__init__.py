"""Stands where SGLang looks for its compiled CPU kernels, and has none.

SGLang imports names from this package at start-up, but calls them only when the operators that they register exist. No
operator is registered here, so every layer takes its pure torch path. A kernel that is called nevertheless fails by its
name instead of computing something wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "99.0.0"  # SGLang checks for a least version


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **more: Any) -> NoReturn:
        raise NotImplementedError(f"SGLang called the compiled kernel {name}; on this CPU there is none")

    absent.__name__ = name
    return absent
