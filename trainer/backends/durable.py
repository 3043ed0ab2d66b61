"""Directories that are there whole or not at all: written beside the target, synced, renamed.

A kill at any moment leaves no half-written target; temporary directories beside it are removed by the next
write of the same target. Replacing a directory that is there has one moment without it, between two renames:
a reader then finds none, never a mixture.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from schemas.errors import StoreError

WRITING = ".writing"
REPLACED = ".replaced"


@contextmanager
def atomic_directory(target: Path, *, sync: bool = True) -> Iterator[Path]:
    """A fresh directory to write into; it takes the place of `target` when the block ends without an error.

    StoreError when the disk does not take it (full, not writable); the target is then as it was before.
    """
    writing = target.with_name(target.name + WRITING)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        yield writing
        if sync:
            _sync_tree(writing)
        _swap(writing, target)
        if sync:
            _sync(target.parent)
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an error of its own
        raise StoreError(f"cannot write {target}: {error}", path=str(target)) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _swap(writing: Path, target: Path) -> None:
    """Rename, over an older directory if there is one.

    A directory cannot be renamed over one that has files.
    """
    replaced = target.with_name(target.name + REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    writing.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
