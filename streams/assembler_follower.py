"""Closed attempts as the log knows them: `control.v1` and the verdicts, folded at the start and followed in a thread.

Folded from as far back as events can still be read again, not from the beginning of time: that is the age of a session before
now, or before the oldest record behind a mark, where a run lay still for longer than that. Older attempts that come up again
all the same give a second terminal event, which nobody counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from journal.event_log import EventFollower
from journal.reader import Place, Record, end_offsets, log_bounds, offsets_at_time, record_at
from journal.record_deletion import committed_offsets
from schemas import events as ev
from schemas import topics
from schemas.errors import HoofprintError, SchemaError
from schemas.settings import KafkaSettings
from streams.assembly_closed import ClosedAttempts

_CLOSING = (topics.CONTROL, topics.VERDICTS)


class ClosedFollower:
    """Keeps `closed` up to date. `group`: whose marks they are. `on_failure` is called from the thread if it can read no more."""

    def __init__(
        self,
        kafka: KafkaSettings,
        group: str,
        horizon_s: float,
        closed: ClosedAttempts,
        on_failure: Callable[[HoofprintError], None],
    ) -> None:
        since = read_again_since(kafka, group, horizon_s, int(time.time() * 1000))
        start: dict[Place, int] = {
            (topic.name, partition): offset
            for topic in _CLOSING
            for partition, offset in offsets_at_time(kafka, topic, since).items()
        }
        self._kafka, self._closed = kafka, closed
        self._handled = dict(start)
        self._follower = EventFollower(kafka, _CLOSING, start, on_bad=self._skip)
        self._follower.follow(self._learn, on_failure)

    async def catch_up(self) -> None:
        """Return when everything is known that stands in the topics now."""
        ends = await asyncio.to_thread(end_offsets, self._kafka, _CLOSING)
        while any(self._handled[place] < end for place, end in ends.items()):  # noqa: ASYNC110 — a thread handles them
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """End the thread."""
        self._follower.close()

    def _learn(self, record: Record, event: ev.Event) -> None:
        self._closed.learn(event)
        self._handled[record.topic.name, record.partition] = record.offset + 1

    def _skip(self, record: Record, _wrong: SchemaError) -> None:
        """Not ours to bury: the controller reads the same record."""
        self._handled[record.topic.name, record.partition] = record.offset + 1


def read_again_since(kafka: KafkaSettings, group: str, horizon_s: float, now_ms: int) -> int:
    """The time, ms, from which on attempts may have been closed whose events are read again."""
    horizon_ms = int(horizon_s * 1000)
    young = offsets_at_time(kafka, topics.SEGMENTS, now_ms - horizon_ms)
    times = [now_ms]
    if any(
        young.values()
    ):  # else nothing was written before that: most starts are those of a run that is younger
        first = {place[1]: low for place, (low, _) in log_bounds(kafka, [topics.SEGMENTS]).items()}
        marks = committed_offsets(kafka, group, topics.SEGMENTS)
        for partition, low in first.items():
            mark = max(low, marks.get(partition, low))
            record = record_at(kafka, topics.SEGMENTS, partition, mark) if mark < young[partition] else None
            times += [record.timestamp_ms] if record is not None else []
    return max(0, min(times) - horizon_ms)
