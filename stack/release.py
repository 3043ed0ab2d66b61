"""Which version of the software this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def software_version() -> str:
    """Of the installed distribution; a bare source tree has none."""
    try:
        return version("hoofprint")
    except PackageNotFoundError:
        return "source"
