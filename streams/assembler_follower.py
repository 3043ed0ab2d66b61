"""Closed attempts as the log knows them: `control.v1` and the verdicts, folded at the start and followed in a thread.

Folded from as far back as events can still be read again, not from the beginning of time. Older attempts that come up
again all the same give a second terminal event, which nobody counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from journal.event_log import EventFollower
from journal.reader import Place, Record, end_offsets, offsets_at_time
from schemas import events as ev
from schemas import topics
from schemas.errors import HoofprintError, SchemaError
from schemas.settings import KafkaSettings
from streams.assembly_closed import ClosedAttempts

_CLOSING = (topics.CONTROL, topics.VERDICTS)


class ClosedFollower:
    """Keeps `closed` up to date. `on_failure` is called from the thread if it can read no more."""

    def __init__(
        self,
        kafka: KafkaSettings,
        horizon_s: float,
        closed: ClosedAttempts,
        on_failure: Callable[[HoofprintError], None],
    ) -> None:
        since = int((time.time() - horizon_s) * 1000)
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
