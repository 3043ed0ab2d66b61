"""Payloads of an archived run, wherever they are by now: in the run's store, in the archive's own, or made again.

The archiver deletes payload files that the running system needs no more (`analytics.payload_collector`). What cannot be made
again it keeps in the archive first. A group's file can: the assembler's own reducer, fed with the attempt's archived
segments, gives the same bytes, and the digest in `GroupCompleted` proves it.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from analytics.catalog import connect_log
from analytics.tables import Archive, archive_directory
from journal.payloads import PayloadStore
from journal.segment_columns import with_columns
from schemas import events as ev
from schemas.codec import decode
from schemas.errors import CorruptPayload, SchemaError, StoreError
from schemas.settings import Settings
from streams import assembly
from streams.assembly_closed import ClosedAttempts
from streams.group_payload import group_payload


def archive_store(run_dir: Path) -> PayloadStore:
    """Where the archive keeps payloads that are deleted elsewhere."""
    return PayloadStore(str(archive_directory(run_dir) / "payloads"))


class ArchivedPayloads:
    """Reads like a `PayloadStore`. StoreError: in none of the places. `settings`: the recorded ones."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self._run_dir, self._settings = run_dir, settings
        self._stores = (
            PayloadStore(settings.payload.url or str(run_dir.absolute() / "payloads")),
            archive_store(run_dir),
        )
        self._log: duckdb.DuckDBPyConnection | None = None

    def get(self, ref: ev.PayloadRef) -> bytes:
        """The recorded bytes."""
        live, kept = self._stores
        try:
            return live.get(ref)
        except StoreError as problem:
            if not _is_absent(problem):
                raise
        return kept.get(ref)

    def open_arrow(self, ref: ev.PayloadRef) -> pa.Table:
        """The same as a table."""
        live, kept = self._stores
        try:
            return live.open_arrow(ref)
        except StoreError as problem:
            if not _is_absent(problem):
                raise
        return kept.open_arrow(ref)

    def sequences(self, group: ev.GroupCompleted) -> pa.Table:
        """A complete group's file. CorruptPayload: the archived segments do not give the recorded bytes."""
        try:
            return self._stores[0].open_arrow(group.payload)
        except StoreError as problem:
            if not _is_absent(problem):
                raise
        made = self._made_again(group)
        if made is None or hashlib.sha256(made).hexdigest() != group.payload.sha256:
            raise CorruptPayload(
                f"{group.payload.uri} is gone, and the archived segments of {group.group_id} attempt {group.attempt}"
                " do not give its bytes",
                uri=group.payload.uri, group_id=group.group_id, attempt=group.attempt,
            )  # fmt: skip
        return pa.ipc.open_file(pa.BufferReader(made)).read_all()

    def _made_again(self, group: ev.GroupCompleted) -> memoryview | None:
        rules = assembly.AssemblyRules.of(self._settings)
        state = assembly.Assembly(rules, ClosedAttempts(rules.run_id))
        for offset, event in self._records(group):
            for effect in assembly.apply(state, offset, event):
                if isinstance(effect, assembly.Completed):
                    return group_payload(effect.sequences)
        return None

    def _records(self, group: ev.GroupCompleted) -> Iterator[tuple[int, ev.Event]]:
        """The attempt's records in log order; what the assembler could not use, it did not use."""
        if self._log is None:
            archive = Archive(self._run_dir)
            self._log = connect_log(archive, ("segments",))
            archive.close()
        rows = self._log.execute(
            """SELECT kafka_offset, raw FROM log_segments WHERE group_id = ? AND attempt = ? AND run_id = ?
            ORDER BY "partition", kafka_offset""",
            [group.group_id, group.attempt, group.run_id],
        ).fetchall()
        for offset, raw in rows:
            try:
                event = decode(raw)
                if isinstance(event, ev.TokenSegment):
                    event = with_columns(event, self.open_arrow)
            except SchemaError:
                continue
            yield offset, event


def _is_absent(problem: StoreError) -> bool:
    return problem.detail.get("errno") == errno.ENOENT
