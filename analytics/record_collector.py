"""Deletes records of `rollout.segments.v1` that nobody reads any more (design §3): the archiver alone, and of this topic alone.

Per partition everything goes that lies below all of these:

* what the archive's own snapshot holds;
* the mark that the assembler's group committed: with none, nothing goes;
* the first record of every session that may still be taken up (`analytics.session_holds`);
* the first record that is younger than `archive.collect_after_s`.

A pass first brings the archive up to the present end of the log, where it finds anything below the other bounds, and asks for
the sessions then: one that seems to be over may have gone on in what was not read yet. Nothing is remembered but what log and
archive say, and a partition's beginning goes at one stroke: a pass that is killed anywhere is done again by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import structlog

from analytics.catalog import connect_log
from analytics.columns import RawRow
from analytics.session_holds import SessionHolds, Sighting
from analytics.tables import Archive
from journal.clock import Clock, system_clock
from journal.metrics_http import Number
from journal.reader import log_bounds, offsets_at_time
from journal.record_deletion import committed_offsets, delete_before
from schemas.codec import decode
from schemas.errors import TransportError
from schemas.events import Event, Verdict
from schemas.ids import worker_group
from schemas.settings import Settings
from schemas.topics import SEGMENTS, TOPIC_OF

_US = 1_000_000
_TABLE = "segments"
log = structlog.get_logger()


class RecordCollector:
    """`catch_up`: archive everything up to the present end of the log. Told every record that is archived."""

    def __init__(
        self,
        settings: Settings,
        archive: Archive,
        catch_up: Callable[[], object],
        clock: Clock = system_clock,
    ) -> None:
        self._kafka, self._archive, self._catch_up, self._clock = settings.kafka, archive, catch_up, clock
        self._assembler = worker_group(settings.kafka.topic_prefix, settings.run.run_id, "assembler")
        self._grace_us = int(settings.archive.collect_after_s * _US)
        proxy = settings.proxy
        self._holds = SessionHolds(
            settings.run.run_id, int(max(proxy.session_max_age_s, proxy.session_idle_s) * _US)
        )
        self.deleted = 0
        self.failures = 0
        for verdict in _archived_verdicts(archive):
            self._holds.judged(verdict)
        for seen in _archived_sightings(archive, self._first_offsets()):
            self._holds.saw(seen)

    def told(self, row: RawRow) -> None:
        """One record of the log, archived or about to be."""
        event = row.event
        if isinstance(event, Verdict):
            self._holds.judged(event)
        elif event is not None and TOPIC_OF.get(type(event)) is SEGMENTS:
            self._holds.told(row.partition, row.kafka_offset, row.timestamp_ms * 1000, event)

    def collect(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """One pass; how many records went. ArchiveError: the archive cannot be written."""
        try:
            now = self._clock()
            if not self._free(now, {}):
                return 0
            self._catch_up()
            # not before: what seems to be over is forgotten
            return 0 if stopping() else self._delete(self._free(now, self._holds.lowest(now)))
        except TransportError as problem:
            self.failures += 1
            log.warning("records_not_deleted", error=problem)
            return 0

    def numbers(self) -> Iterator[Number]:
        """What a scrape shows."""
        yield Number("hoofprint_log_records_deleted_total", self.deleted)
        yield Number("hoofprint_log_deletion_failures_total", self.failures)

    def _delete(self, free: Mapping[int, range]) -> int:
        if not free:
            return 0
        left = delete_before(
            self._kafka, SEGMENTS, {partition: gone.stop for partition, gone in free.items()}
        )
        count = sum(left[partition] - gone.start for partition, gone in free.items())
        self.deleted += count
        log.info("records_deleted", topic=SEGMENTS.name, records=count, first_offsets=left)
        return count

    def _free(self, now: int, held: Mapping[int, int]) -> dict[int, range]:
        """Per partition the offsets that may go."""
        marks = committed_offsets(self._kafka, self._assembler, SEGMENTS)
        young = offsets_at_time(self._kafka, SEGMENTS, (now - self._grace_us) // 1000)
        return deletable(self._first_offsets(), self._archive.next_offsets(_TABLE), marks, held, young)

    def _first_offsets(self) -> dict[int, int]:
        return {
            partition: first for (_, partition), (first, _) in log_bounds(self._kafka, [SEGMENTS]).items()
        }


def deletable(
    first: Mapping[int, int],
    archived: Mapping[int, int],
    marks: Mapping[int, int],
    held: Mapping[int, int],
    young: Mapping[int, int],
) -> dict[int, range]:
    """Per partition the offsets from `first` on that lie below all bounds. Without an archive or a mark: none."""
    ends = {
        partition: min(
            (archived[partition], marks[partition], *(b[partition] for b in (held, young) if partition in b))
        )
        for partition in first
        if partition in archived and partition in marks
    }
    return {
        partition: range(first[partition], end) for partition, end in ends.items() if end > first[partition]
    }


def _archived_verdicts(archive: Archive) -> Iterator[Verdict]:
    for event in _decoded(archive, "verdicts", "event_type = 'Verdict'"):
        assert isinstance(event, Verdict)
        yield event


def _decoded(archive: Archive, table: str, condition: str) -> Iterator[Event]:
    connection = connect_log(archive, [table])
    try:
        cursor = connection.execute(f"SELECT raw FROM log_{table} WHERE {condition}")  # noqa: S608 — names of ours
        while rows := cursor.fetchmany(2000):
            yield from (decode(raw) for (raw,) in rows)
    finally:
        connection.close()


def _archived_sightings(archive: Archive, first: Mapping[int, int]) -> Iterator[Sighting]:
    """Whose records of those that the log still has are archived."""
    connection = connect_log(archive, [_TABLE])
    try:
        for partition, offset in first.items():
            cursor = connection.execute(
                f"""SELECT "partition", min(kafka_offset), epoch_us(max(kafka_timestamp)), run_id, kind, session_id, group_id,
                attempt, coalesce(bool_or("end" IS NOT NULL), false) FROM log_{_TABLE}
                WHERE event_type IS NOT NULL AND "partition" = ? AND kafka_offset >= ? GROUP BY ALL""",  # noqa: S608
                [partition, offset],
            )
            while rows := cursor.fetchmany(2000):
                yield from (Sighting(*row) for row in rows)
    finally:
        connection.close()
