"""The archive on disk: one Iceberg table per topic in a SQLite catalog, and what it knows about the log.

Invariant: rows and the Kafka offsets that follow them are committed in one snapshot (the offsets stand in its summary), so
after any crash the current snapshot alone says where to go on. A lock file keeps a second writer out; should one get in
all the same, its commit fails (`SnapshotConflict`) instead of being repeated on top of rows it has not seen.

A run makes a snapshot every few seconds, for days. Only the current one says anything, and a commit costs as much as there are
snapshots and manifests: so older snapshots are dropped, and manifests merged, now and then. The data files stay.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import Table
from sqlalchemy.exc import SQLAlchemyError

from analytics.columns import topic_schema
from schemas.errors import ArchiveError, SnapshotConflict
from schemas.topics import BATCHES, CONTROL, DEAD_LETTERS, FEEDBACK, PROMPTS, SEGMENTS, VERDICTS, Topic

CATALOG = "hoofprint"
NAMESPACE = "hoofprint"
OFFSETS = "hoofprint.next-offsets"
TABLES: dict[str, Topic] = {
    "prompts": PROMPTS,
    "segments": SEGMENTS,
    "control": CONTROL,
    "verdicts": VERDICTS,
    "batches": BATCHES,
    "feedback": FEEDBACK,
    "dead_letters": DEAD_LETTERS,
}
TABLE_OF: dict[str, str] = {topic.name: name for name, topic in TABLES.items()}
PROPERTIES = {
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "50",
    "commit.retry.num-retries": "0",  # a repeated commit would add its rows to another writer's
    "write.metadata.previous-versions-max": "10",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.parquet.compression-codec": "zstd",
    "write.parquet.compression-level": "1",
}
SNAPSHOTS_KEPT = 50


def archive_directory(run_dir: Path) -> Path:
    """Where a run's archive lies."""
    return run_dir.absolute() / "archive"


class Archive:
    """The tables of one run. With `create` the missing ones are made, and new columns are added to older ones."""

    def __init__(self, run_dir: Path, create: bool = False) -> None:
        self.directory = archive_directory(run_dir)
        database = self.directory / "catalog.db"
        if not create and not database.exists():
            raise ArchiveError(f"no archive at {self.directory}", directory=str(self.directory))
        warehouse = self.directory / "warehouse"
        warehouse.mkdir(parents=True, exist_ok=True)
        self.catalog = SqlCatalog(CATALOG, uri=f"sqlite:///{database}", warehouse=str(warehouse))
        self._tables: dict[str, Table] = {}
        if create:
            self.catalog.create_namespace_if_not_exists(NAMESPACE)
            for name, topic in TABLES.items():
                self._tables[name] = self._create(name, topic)

    def _create(self, name: str, topic: Topic) -> Table:
        identifier = f"{NAMESPACE}.{name}"
        schema = topic_schema(topic)
        try:
            table = self.catalog.load_table(identifier)
        except NoSuchTableError:
            return self.catalog.create_table(identifier, schema=schema, properties=PROPERTIES)
        if set(schema.names) - set(table.schema().as_arrow().names):
            with table.update_schema() as update:
                update.union_by_name(schema)
        if missing := {key: value for key, value in PROPERTIES.items() if table.properties.get(key) != value}:
            with table.transaction() as change:
                change.set_properties(missing)
        return table

    def table(self, name: str) -> Table | None:
        """A table in the state last seen or written here; None where the archive has none."""
        if name not in self._tables:
            try:
                self._tables[name] = self.catalog.load_table(f"{NAMESPACE}.{name}")
            except NoSuchTableError:
                return None
        return self._tables[name]

    def next_offsets(self, name: str) -> dict[int, int]:
        """Partition to the offset after the last archived record, from the current snapshot."""
        table = self.table(name)
        snapshot = table.current_snapshot() if table is not None else None
        if snapshot is None or snapshot.summary is None:
            return {}
        text = snapshot.summary.additional_properties.get(OFFSETS, "{}")
        return {int(partition): int(offset) for partition, offset in json.loads(text).items()}

    def append(self, name: str, rows: pa.Table, next_offsets: Mapping[int, int]) -> None:
        """Rows and offsets in one snapshot. Raises SnapshotConflict when somebody else wrote to the table, and
        ArchiveError when it cannot be written (disk full); the table is then as it was."""
        table = self.table(name)
        assert table is not None
        offsets = json.dumps({str(partition): offset for partition, offset in sorted(next_offsets.items())})
        try:
            table.append(rows, snapshot_properties={OFFSETS: offsets})
            _drop_old_snapshots(table)
        except CommitFailedException as conflict:
            raise SnapshotConflict(
                f"table {name} was written by somebody else: {conflict}", table=name
            ) from conflict
        except (OSError, SQLAlchemyError) as problem:
            raise ArchiveError(
                f"table {name} cannot be written: {problem}", table=name, reason=str(problem)
            ) from problem

    def data_files(self, name: str) -> list[Path]:
        """Data files of the current snapshot."""
        table = self.table(name)
        return (
            [] if table is None else [local_path(task.file.file_path) for task in table.scan().plan_files()]
        )

    def refresh(self) -> None:
        """Forget what was seen: the next question is answered by the newest snapshots."""
        self._tables.clear()

    def close(self) -> None:
        """Let go of the catalog's database."""
        self.catalog.engine.dispose()


def _drop_old_snapshots(table: Table) -> None:
    """All but the current one, once there are too many."""
    current, known = table.current_snapshot(), table.metadata.snapshots
    if current is not None and len(known) > SNAPSHOTS_KEPT:
        old = [snapshot.snapshot_id for snapshot in known if snapshot.snapshot_id != current.snapshot_id]
        table.maintenance.expire_snapshots().by_ids(old).commit()


def local_path(location: str) -> Path:
    """Path of a data file; Iceberg may name it as a path or as a file URL."""
    return Path(unquote(urlparse(location).path) if location.startswith("file:") else location)


@contextmanager
def writer_lock(run_dir: Path) -> Iterator[bool]:
    """True inside if this process may write the archive; the kernel frees the lock when its holder dies."""
    directory = archive_directory(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "writer.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
