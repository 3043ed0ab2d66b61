"""SQL over the archive: DuckDB on the data files that the Iceberg snapshots name.

`log_<table>` are the records as archived, repeats and void events included. One view per event type has each fact once
(of records with the same `event_id` the one with the first offset counts, as for every consumer of the log) and only that
event's columns. `views.sql` derives the domain's relations from them. A connection shows the snapshots of the moment at
which it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import duckdb

from analytics.columns import event_columns, topic_schema
from analytics.tables import TABLES, Archive
from schemas import events as ev
from schemas.errors import ArchiveError

PLURALS: dict[type[ev.Event], str] = {
    ev.TokenSegment: "token_segments",
    ev.Verdict: "verdicts",
    ev.TrainBatch: "train_batches",
    ev.SequenceFeedback: "sequence_feedback",
    ev.DeadLetter: "dead_letters",
    ev.Alarm: "alarms",
}
VIEWS = Path(__file__).with_name("views.sql")
QUERIES = Path(__file__).with_name("queries")


def view_name(event_type: type[ev.Event]) -> str:
    """View of an event type: its name in snake case, things in the plural, happenings as they are."""
    return PLURALS.get(event_type) or re.sub(r"(?<!^)(?=[A-Z])", "_", event_type.__name__).lower()


def connect(run_dir: Path) -> duckdb.DuckDBPyConnection:
    """Connection with all views of a run's archive. Raises ArchiveError when there is none."""
    archive = Archive(run_dir)
    try:
        connection = connect_log(archive, TABLES)
    finally:
        archive.close()
    for name, topic in TABLES.items():
        _find_repeats(connection, name)
        for event_type in topic.events:
            _event_view(connection, name, event_type)
    connection.execute(VIEWS.read_text(encoding="utf-8"))
    return connection


def connect_log(archive: Archive, names: Iterable[str]) -> duckdb.DuckDBPyConnection:
    """Connection with `log_<table>` of these tables alone: the records as archived, at no cost beforehand."""
    connection = duckdb.connect(":memory:")
    connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
    for name in names:
        _log_view(connection, name, archive.data_files(name))
    return connection


def query_names() -> list[str]:
    """The named queries."""
    return sorted(path.stem for path in QUERIES.glob("*.sql"))


def query_text(name: str) -> str:
    """SQL of a named query. Raises ArchiveError for an unknown name."""
    if name not in query_names():
        raise ArchiveError(f"no query is named {name!r}", name=name, known=query_names())
    return (QUERIES / f"{name}.sql").read_text(encoding="utf-8")


def _log_view(connection: duckdb.DuckDBPyConnection, name: str, paths: list[Path]) -> None:
    if paths:
        listed = ", ".join(_quote(path) for path in paths)
        # by name: files of an older version of the software lack the newer columns
        source = f"read_parquet([{listed}], union_by_name = true)"
    else:
        connection.register(f"empty_{name}", topic_schema(TABLES[name]).empty_table())
        source = f"empty_{name}"
    connection.execute(f"CREATE VIEW log_{name} AS SELECT * FROM {source}")  # noqa: S608 — names of ours, quoted paths


def _find_repeats(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    # few rows, found once: the views then need no window over all columns
    connection.execute(
        f"""CREATE TEMP TABLE repeats_{name} AS SELECT "partition", kafka_offset FROM log_{name} WHERE event_type IS NOT NULL
        QUALIFY row_number() OVER (PARTITION BY event_type, event_id ORDER BY "partition", kafka_offset) > 1"""  # noqa: S608
    )


def _event_view(connection: duckdb.DuckDBPyConnection, table: str, event_type: type[ev.Event]) -> None:
    own = ", ".join(f'"{column}"' for column in event_columns(event_type))
    connection.execute(
        f"""CREATE VIEW {view_name(event_type)} AS SELECT {own}, "partition", kafka_offset, kafka_timestamp, raw
        FROM log_{table} ANTI JOIN repeats_{table} USING ("partition", kafka_offset)
        WHERE event_type = '{event_type.__name__}'"""  # noqa: S608
    )


def _quote(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
