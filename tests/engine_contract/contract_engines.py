"""The engines that the contract suite runs against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stack.engine.launch import EngineProcess

ENGINES = {
    "cpu": ("stack.engine", {"min_step_ms": 5}, 90.0),
    "sglang": ("stack.sglang.launch", {}, 280.0),
}
"""Module, flags, seconds until ready at the most (SGLang's first start compiles thousands of modules)."""


@contextmanager
def started(name: str, checkpoint: Path, **more: bool) -> Iterator[EngineProcess]:
    """One of them, serving a checkpoint as version `v0`."""
    module, flags, patience_s = ENGINES[name]
    process = EngineProcess(checkpoint, module=module, weight_version="v0", **flags, **more)
    try:
        process.start(patience_s)
        yield process
    finally:
        process.stop(20.0)
