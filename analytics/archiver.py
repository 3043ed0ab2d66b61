"""The archiver: every topic into its Iceberg table, each record exactly once, whatever dies.

It reads all partitions by explicit assignment from the offsets that its own last snapshots name, gathers records, and
commits them together with the offsets that follow (`analytics.tables`). What was read but not committed is read again;
what was written but not committed is no part of the table. A record that does not decode is archived as its bytes. An
offset that is not the expected one ends the process (`ReplayGap`): nothing of ours writes transactions, and records are
deleted by this process alone, when they are archived; so a gap is a loss. Shares a machine with the training: it sleeps, then
takes what has gathered. Between two snapshots it deletes payload files and records that nothing needs any more
(`analytics.payload_collector`, `analytics.record_collector`); nobody else deletes any.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import structlog

from analytics.collecting import Collecting
from analytics.columns import RawRow, to_table
from analytics.tables import TABLE_OF, TABLES, Archive, writer_lock
from journal.log_setup import configure_logging
from journal.metrics_http import serve_metrics
from journal.reader import Place, Record, TopicReader
from schemas.codec import decode
from schemas.errors import ArchiveError, HoofprintError, ReplayGap, SchemaError, TransportError
from schemas.events import Event
from schemas.settings import ArchiveSettings, KafkaSettings, Settings
from schemas.topics import ALL_TOPICS

GATHER_S = 0.4
SILENCE_S = 30.0
LOCK_PATIENCE_S = 30.0
MonotonicClock = Callable[[], float]
log = structlog.get_logger()


class Archiver:
    """Gathers records per table and commits them. One writer per archive: take `writer_lock` first."""

    def __init__(
        self,
        archive: Archive,
        kafka: KafkaSettings,
        settings: ArchiveSettings,
        clock: MonotonicClock = time.monotonic,
    ) -> None:
        self._archive = archive
        self._settings = settings
        self._clock = clock
        self.on_row: Callable[[RawRow], None] = _nobody
        self._next: dict[str, dict[int, int]] = {name: archive.next_offsets(name) for name in TABLES}
        self._rows: dict[str, list[RawRow]] = {name: [] for name in TABLES}
        self._oldest: float | None = None
        start = {
            (TABLES[name].name, partition): offset
            for name, known in self._next.items()
            for partition, offset in known.items()
        }
        self._reader = TopicReader(kafka, ALL_TOPICS, start)

    def take(self, wait_s: float = 0.0) -> int:
        """Gather what the client has fetched, waiting at most so long for the first; how many records."""
        count = 0
        records = self._reader.poll(wait_s, max_records=1000)
        while records:
            self.accept(records)
            count += len(records)
            records = [] if self.due() else self._reader.poll(0.0, max_records=1000)
        return count

    def accept(self, records: Iterable[Record]) -> None:
        """Gather these records, which must be the next ones of their partitions. Raises ReplayGap."""
        for record in records:
            name = TABLE_OF[record.topic.name]
            expected = self._next[name].get(record.partition, 0)
            if record.offset != expected:
                raise ReplayGap(
                    f"{record.topic.name}/{record.partition} goes on at {record.offset}, expected {expected}",
                    topic=record.topic.name, partition=record.partition, expected=expected, found=record.offset,
                )  # fmt: skip
            self._next[name][record.partition] = record.offset + 1
            row = _row(record)
            self._rows[name].append(row)
            self.on_row(row)
        if self._oldest is None and any(self._rows.values()):
            self._oldest = self._clock()

    def due(self) -> bool:
        """Whether the oldest gathered record has waited long enough, or enough of them wait."""
        waited = self._oldest is not None and self._clock() - self._oldest >= self._settings.flush_s
        return waited or sum(map(len, self._rows.values())) >= self._settings.flush_rows

    def flush(self) -> int:
        """Commit what was gathered, table by table (a crash between two tables leaves each one consistent)."""
        count = 0
        for name, rows in self._rows.items():
            if rows:
                self._archive.append(name, to_table(TABLES[name], rows), self._next[name])
                count += len(rows)
                self._rows[name] = []
        self._oldest = None
        return count

    def end_offsets(self) -> dict[Place, int]:
        """Where the log ends now."""
        return self._reader.end_offsets()

    def catch_up(self, ends: Mapping[Place, int]) -> int:
        """Gather and commit up to these offsets. TransportError: the broker stays away."""
        self._check_beginnings()
        silent_since, count = self._clock(), 0
        while any(self._reader.positions().get(place, 0) < end for place, end in ends.items()):
            taken = self.take(wait_s=0.2)
            count += taken
            if self.due():
                self.flush()
            if taken:
                silent_since = self._clock()
            elif self._clock() - silent_since > SILENCE_S:
                raise TransportError("the broker sends nothing", silent_s=SILENCE_S)
        self.flush()
        return count

    def _check_beginnings(self) -> None:
        """ReplayGap: the log begins behind what is archived of it."""
        for (topic, partition), first in self._reader.first_offsets().items():
            expected = self._next[TABLE_OF[topic]].get(partition, 0)
            if first > expected:
                raise ReplayGap(
                    f"records of {topic}/{partition} were deleted that this archive does not hold",
                    topic=topic, partition=partition, expected=expected, found=first,
                )  # fmt: skip

    def close(self) -> None:
        """Leave the broker; nothing is committed."""
        self._reader.close()


def _nobody(_row: RawRow) -> None:
    """Where nothing is collected."""


def _row(record: Record) -> RawRow:
    """Decoded on arrival: that spreads the work and frees the flush from it."""
    event: Event | None = None
    try:
        event = decode(record.value)
    except SchemaError as wrong:
        log.warning(
            "undecodable record archived as bytes", error=wrong, topic=record.topic.name, offset=record.offset
        )
    return RawRow(record.partition, record.offset, record.timestamp_ms, record.key, record.value, event)


def archive_until(
    settings: Settings, end_offsets: Mapping[Place, int] | None = None, timeout_s: float = 120.0
) -> None:
    """Bring the archive up to these offsets (None: the present). Where an archiver runs, wait until it has done so."""
    with writer_lock(settings.run_directory) as free:
        if free:
            archive = Archive(settings.run_directory, create=True)
            archiver = Archiver(archive, settings.kafka, settings.archive)
            try:
                archiver.catch_up(archiver.end_offsets() if end_offsets is None else end_offsets)
            finally:
                archiver.close()
                archive.close()
            return
    if end_offsets is None:
        reader = TopicReader(settings.kafka, ALL_TOPICS)
        try:
            end_offsets = reader.end_offsets()
        finally:
            reader.close()
    _await_archiver(settings.run_directory, end_offsets, timeout_s)


def _await_archiver(run_dir: Path, ends: Mapping[Place, int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        archive = Archive(run_dir)
        known = {name: archive.next_offsets(name) for name in TABLES}
        archive.close()
        missing = {
            place: end for place, end in ends.items() if known[TABLE_OF[place[0]]].get(place[1], 0) < end
        }
        if not missing:
            return
        if time.monotonic() > deadline:
            raise ArchiveError(
                "another process writes this archive and did not reach the end of the log in time",
                missing={f"{name}/{partition}": end for (name, partition), end in missing.items()},
            )
        time.sleep(0.2)


def main(settings: Settings) -> int:
    """The archiver's process: until SIGTERM, then up to the end of the log as it stood at the signal."""
    configure_logging("archiver")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        _run(settings, stop)
    except HoofprintError as error:
        log.error("archiver ends", error=error)  # noqa: TRY400 — one line with code and detail, no traceback
        return 1
    except Exception as error:  # process boundary: errors of the catalog, of the disk
        log.exception("archiver ends", error=str(error), code="archive_error", kind=type(error).__name__)
        return 1
    return 0


def _run(settings: Settings, stop: threading.Event) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while not stop.is_set():
        with writer_lock(settings.run_directory) as free:
            if free:
                _serve(settings, stop)
                return
        if time.monotonic() > deadline:
            raise ArchiveError("another process writes this archive", directory=str(settings.run_directory))
        stop.wait(0.5)


def _serve(settings: Settings, stop: threading.Event) -> None:
    archive = Archive(settings.run_directory, create=True)
    archiver = Archiver(archive, settings.kafka, settings.archive)
    log.info("archiving", directory=str(archive.directory))
    collecting = Collecting(settings, archive, lambda: archiver.catch_up(archiver.end_offsets()))
    archiver.on_row = collecting.told
    serve_metrics(settings.metrics.archiver_port, collecting.numbers)
    try:
        while not stop.wait(GATHER_S):
            archiver.take()
            if archiver.due():
                archiver.flush()
            collecting.collect_if_due(stop.is_set)
        archiver.flush()  # should the broker be gone already, what was read is safe
        rest = archiver.catch_up(archiver.end_offsets())
        log.info("archive is complete", last_records=rest)
    finally:
        archiver.close()
        archive.close()
