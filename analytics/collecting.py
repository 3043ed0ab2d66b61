"""What the archiver clears away between two snapshots: payload files, then records of the log, each by its own setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from analytics.columns import RawRow
from analytics.payload_collector import PayloadCollector
from analytics.record_collector import RecordCollector
from analytics.tables import Archive
from journal.metrics_http import Number
from journal.payloads import PayloadStore
from schemas.settings import Settings

MonotonicClock = Callable[[], float]


class Collector(Protocol):
    """Told every record that is archived; a pass deletes what nothing needs any more."""

    def told(self, row: RawRow) -> None: ...

    def collect(self, stopping: Callable[[], bool]) -> int: ...

    def numbers(self) -> Iterator[Number]: ...


class Collecting:
    """The passes of one process, a first one at once. `catch_up`: archive everything up to the present end of the log."""

    def __init__(
        self,
        settings: Settings,
        archive: Archive,
        catch_up: Callable[[], object],
        clock: MonotonicClock = time.monotonic,
    ) -> None:
        self._every_s, self._clock = settings.archive.collect_every_s, clock
        self._collectors: list[Collector] = []
        if settings.archive.collect:
            store = PayloadStore(settings.payload_url)
            self._collectors.append(PayloadCollector(settings, archive, store, catch_up))
        if settings.archive.delete_records:
            self._collectors.append(RecordCollector(settings, archive, catch_up))
        self._due_at = clock()

    def told(self, row: RawRow) -> None:
        """One record of the log, archived or about to be."""
        for collector in self._collectors:
            collector.told(row)

    def collect_if_due(self, stopping: Callable[[], bool]) -> None:
        """A pass of each, `archive.collect_every_s` after the last one."""
        if self._clock() >= self._due_at:
            for collector in self._collectors:
                collector.collect(stopping)
            self._due_at = self._clock() + self._every_s

    def numbers(self) -> Iterator[Number]:
        """What a scrape shows."""
        for collector in self._collectors:
            yield from collector.numbers()
