"""The payload store: large bytes under their own digest, at `<run_id>/<group_id>/<attempt>/<sha256>` below any fsspec URL.

Written whole or not at all: locally a temporary file is renamed (and synced before, by setting); object stores have no
half-written objects. The same bytes give the same place, so writing again is harmless. A reader checks the digest.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from schemas.errors import CorruptPayload, StoreError
from schemas.events import PayloadRef

_serial = itertools.count()
_TRIES = 8
_DEPTH = 4  # run, group, attempt, digest
_LONGEST_NAME = 255


class StoredPayload(NamedTuple):
    """One file of the store; left-over temporary files (kill -9 in the middle of a write) are listed as well."""

    uri: str
    size: int
    modified_at: int  # UTC microseconds


class PayloadStore:
    """`url`: any fsspec URL or a directory. `fsync`: a written payload survives a power loss."""

    def __init__(self, url: str, fsync: bool = False) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self._local = Path(self._root) if isinstance(self._fs, LocalFileSystem) else None
        self._fsync = fsync

    @property
    def waits(self) -> bool:
        """Whether `put` waits, for the disk or for a store that is elsewhere: then several at a time, in threads, share the
        wait."""
        return self._fsync or self._local is None

    def put(
        self, run_id: str, group_id: str, attempt: int, data: bytes | memoryview, codec: str
    ) -> PayloadRef:
        """Store the bytes. StoreError: nothing was stored (disk full, store away)."""
        digest = hashlib.sha256(data).hexdigest()
        uri = f"{_part(run_id)}/{place(group_id, attempt)}/{digest}"
        self._put(uri, data, digest)
        return PayloadRef(uri, digest, memoryview(data).nbytes, codec)

    def keep(self, uri: str, data: bytes) -> None:
        """Store bytes of another store at the place that they had there. StoreError, CorruptPayload: not these bytes."""
        digest = hashlib.sha256(data).hexdigest()
        if digest != PurePosixPath(uri).name:
            raise CorruptPayload(f"{uri} is not the place of these bytes", uri=uri, sha256=digest)
        self._inside(uri)
        self._put(uri, data, digest)

    def _put(self, uri: str, data: bytes | memoryview, digest: str) -> None:
        try:
            if self._local is not None:
                self._put_local(self._local / uri, data, digest, memoryview(data).nbytes)
            else:
                self._fs.pipe_file(f"{self._root}/{uri}", bytes(data))
        except OSError as problem:
            raise _store_error("written", uri, problem) from problem

    def get(self, ref: PayloadRef) -> bytes:
        """The bytes. CorruptPayload: not those that were stored. StoreError: missing, or the store is away."""
        path = self._path(ref)
        try:
            data = Path(path).read_bytes() if self._local is not None else self._fs.cat_file(path)
        except OSError as problem:
            raise _store_error("read", ref.uri, problem) from problem
        _check(ref, data)
        return bytes(data)

    def open_arrow(self, ref: PayloadRef) -> pa.Table:
        """The Arrow file as a table, its columns memory-mapped where the store is a directory; the digest is checked."""
        try:
            buffer = (
                pa.memory_map(self._path(ref)).read_buffer()
                if self._local is not None
                else pa.py_buffer(self.get(ref))
            )
        except OSError as problem:
            raise _store_error("read", ref.uri, problem) from problem
        _check(ref, memoryview(buffer))
        try:
            return pa.ipc.open_file(pa.BufferReader(buffer)).read_all()
        except (pa.ArrowInvalid, OSError) as wrong:
            raise CorruptPayload(f"{ref.uri} is no Arrow file", uri=ref.uri, codec=ref.codec) from wrong

    def delete(self, uri: str) -> None:
        """Remove one file; an absent one is fine. Directories of an attempt that are left empty go with it."""
        path = self._inside(uri)
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return
        except OSError as problem:
            raise _store_error("deleted", uri, problem) from problem
        if self._local is not None:
            _remove_empty(Path(path).parent, self._local)

    def list(self, run_id: str) -> Iterator[StoredPayload]:
        """Every file of a run."""
        top = f"{self._root}/{_part(run_id)}"
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(top, detail=True) if self._fs.exists(top) else {}
        except OSError as problem:
            raise _store_error("listed", run_id, problem) from problem
        for path, info in sorted(found.items()):
            yield StoredPayload(
                str(PurePosixPath(path).relative_to(self._root)), int(info["size"]), _modified(info)
            )

    def _put_local(self, target: Path, data: bytes | memoryview, digest: str, size: int) -> None:
        if _holds(target, digest, size):
            return
        temporary = target.with_name(f".{digest}.{os.getpid()}.{next(_serial)}.tmp")
        try:
            _write(temporary, data, fsync=self._fsync)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if self._fsync:
            _sync_directory(target.parent)

    def _path(self, ref: PayloadRef) -> str:
        """A reference comes out of a record, which may say anything: what is no file's place is not even looked for."""
        parts = PurePosixPath(ref.uri).parts
        if len(parts) != _DEPTH or parts[-1] != ref.sha256:
            raise CorruptPayload(f"{ref.uri!r} is not the place of {ref.sha256!r}", uri=ref.uri)
        return self._inside(ref.uri)

    def _inside(self, uri: str) -> str:
        parts = PurePosixPath(uri).parts
        if not parts or parts[0] == "/" or ".." in parts or not all(map(_may_be_a_name, parts)):
            raise CorruptPayload(f"{uri!r} is no place in the store", uri=uri)
        return f"{self._root}/{uri}"


def _may_be_a_name(part: str) -> bool:
    """Whether it is one that `_part` gives."""
    return part.isascii() and part.isprintable() and 0 < len(part) <= _LONGEST_NAME


def place(group_id: str, attempt: int) -> str:
    """Where the files of an attempt lie, below the run."""
    return f"{_part(group_id)}/{attempt}"


def _part(name: str) -> str:
    """A name as one path component: no slash, not empty, not a dot directory, and not longer than file systems take.

    Of a long one the beginning is left, and the name's digest tells it from others.
    """
    safe = quote(name, safe="") or "%"
    if len(safe) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return f"{safe[: _LONGEST_NAME - len(digest) - 1]}-{digest}"
    return safe.replace(".", "%2E") if not safe.strip(".") else safe


def _holds(path: Path, digest: str, size: int) -> bool:
    """Whether the file is there and whole (a power loss can leave the right name with wrong bytes)."""
    try:
        return path.stat().st_size == size and hashlib.sha256(path.read_bytes()).hexdigest() == digest
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes | memoryview, *, fsync: bool) -> None:
    with _new_file(path) as file:
        rest = memoryview(data).cast("B")
        while rest:  # a raw write may be short, when the disk is nearly full for one
            rest = rest[file.write(rest) :]
        if fsync:
            os.fsync(file.fileno())


def _new_file(path: Path) -> FileIO:
    """The directory is made when it is missing; somebody who tidies up may take it away again at the same moment."""
    for _ in range(_TRIES):
        try:
            return path.open("xb", buffering=0)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("xb", buffering=0)


def _remove_empty(directory: Path, root: Path) -> None:
    """Upwards, as long as nothing is in there; the run's own directory stays."""
    while directory.parent not in (root, directory) and root in directory.parents:
        try:
            directory.rmdir()
        except OSError:  # not empty, or gone
            return
        directory = directory.parent


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check(ref: PayloadRef, data: bytes | memoryview) -> None:
    size = memoryview(data).nbytes
    digest = hashlib.sha256(data).hexdigest() if size == ref.size else None
    if digest != ref.sha256:
        raise CorruptPayload(
            f"{ref.uri} does not hold the recorded bytes",
            uri=ref.uri,
            size=size,
            expected_size=ref.size,
            sha256=digest or "",
        )


def _modified(info: dict[str, Any]) -> int:
    stamp = info.get("mtime") or info.get("LastModified") or info.get("created") or 0
    seconds = stamp.timestamp() if hasattr(stamp, "timestamp") else float(stamp)
    return int(seconds * 1_000_000)


def _store_error(verb: str, uri: str, problem: OSError) -> StoreError:
    said = problem.strerror or str(problem)
    # object stores say that a file is missing without a number
    number = errno.ENOENT if isinstance(problem, FileNotFoundError) else problem.errno
    return StoreError(f"payload {uri} cannot be {verb}: {said}", uri=uri, reason=said, errno=number)
