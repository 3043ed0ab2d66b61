"""The archived log as events again: what replay, what-if and the invariants start from.

Events come from the archive's exact bytes, never from its typed columns. Order is that of the offsets. Records that do not
decode are left out, as every fold leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import duckdb

from analytics.catalog import connect_log
from analytics.tables import TABLE_OF, Archive
from schemas import events as ev
from schemas.codec import decode
from schemas.errors import ArchiveError, SchemaError
from schemas.settings import Settings
from schemas.topics import Topic

E = TypeVar("E", bound=ev.Event)


class Archived(NamedTuple):
    """One record of a topic with a single partition."""

    offset: int
    raw: bytes
    event: ev.Event


def archived_events(connection: duckdb.DuckDBPyConnection, table: str, run_id: str) -> Iterator[Archived]:
    """All records of this run in `log_<table>` (repeats included) in offset order."""
    query = f'SELECT kafka_offset, raw FROM log_{table} WHERE run_id = ? ORDER BY "partition", kafka_offset'  # noqa: S608
    for offset, raw in connection.execute(query, [run_id]).fetchall():
        try:
            event = decode(raw)
        except SchemaError:
            continue
        yield Archived(offset, raw, event)


def unique_events(connection: duckdb.DuckDBPyConnection, table: str, run_id: str) -> Iterator[Archived]:
    """The same with each fact once: its first record."""
    seen: set[tuple[str, str]] = set()
    for record in archived_events(connection, table, run_id):
        fact = (type(record.event).__name__, record.event.event_id)
        if fact not in seen:
            seen.add(fact)
            yield record


def live_session_events(connection: duckdb.DuckDBPyConnection, run_id: str) -> list[ev.Event]:
    """Session events and rewards without void ones and repeats; per partition in log order."""
    query = """SELECT raw FROM log_segments ANTI JOIN repeats_segments USING ("partition", kafka_offset)
               ANTI JOIN void_session_events USING ("partition", kafka_offset)
               WHERE event_type IS NOT NULL AND run_id = ? ORDER BY "partition", kafka_offset"""
    return [decode(raw) for (raw,) in connection.execute(query, [run_id]).fetchall()]


def archived_record(
    run_dir: Path, topic: Topic, partition: int, offset: int
) -> tuple[bytes | None, bytes] | None:
    """Key and bytes of one record; None: there is no archive, or it does not hold the record."""
    name = TABLE_OF[topic.name]
    try:
        archive = Archive(run_dir)
    except ArchiveError:
        return None
    connection = connect_log(archive, [name])
    try:
        found = connection.execute(
            f'SELECT key, raw FROM log_{name} WHERE "partition" = ? AND kafka_offset = ?',  # noqa: S608
            [partition, offset],
        ).fetchone()
    finally:
        connection.close()
        archive.close()
    return None if found is None else (found[0], found[1])


def run_id_of(connection: duckdb.DuckDBPyConnection, run_dir: Path) -> str:
    """The run that this directory belongs to: the one of its name, else the first that was configured in the log."""
    found = connection.execute("SELECT run_id FROM run_configured ORDER BY kafka_offset").fetchall()
    names = [str(name) for (name,) in found]
    if not names:
        raise ArchiveError("the archived control log has no RunConfigured", directory=str(run_dir))
    return run_dir.name if run_dir.name in names else names[0]


def recorded_settings(connection: duckdb.DuckDBPyConnection, run_id: str) -> Settings:
    """The settings of the run's first RunConfigured."""
    query = "SELECT settings FROM run_configured WHERE run_id = ? ORDER BY kafka_offset LIMIT 1"
    row = connection.execute(query, [run_id]).fetchone()
    if row is None:
        raise ArchiveError(f"run {run_id} was never configured", run_id=run_id)
    return Settings.from_json(str(row[0]))


def completed_groups(
    connection: duckdb.DuckDBPyConnection, run_id: str
) -> dict[tuple[str, int], ev.GroupCompleted]:
    """Per attempt its first end, where that is a completion (rule 7: later ends are ignored)."""
    ends: dict[tuple[str, int], ev.Event] = {}
    for record in archived_events(connection, "control", run_id):
        if isinstance(record.event, ev.GroupCompleted | ev.GroupFailed):
            ends.setdefault((record.event.group_id, record.event.attempt), record.event)
    return {key: end for key, end in ends.items() if isinstance(end, ev.GroupCompleted)}


def of_type(records: Iterator[Archived], event_type: type[E]) -> list[E]:
    """Only the events of this class."""
    return [record.event for record in records if isinstance(record.event, event_type)]
