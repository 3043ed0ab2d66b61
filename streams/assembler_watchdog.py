"""Faust can stop fetching a partition without a word (its issues 523, 629). Whoever lags and does not move starts anew.

A partition stalls when records stand behind the next one to handle and that place has not moved over several looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from journal.reader import log_bounds
from schemas import topics
from schemas.errors import TransportError
from schemas.settings import KafkaSettings

if TYPE_CHECKING:
    import faust

log = structlog.get_logger()
_LOOK_S = 5.0
_STALL_S = 30.0
_MARGIN_S = 10.0


class Watchdog:
    """`next_offset(partition)`: what the worker handles next; None: nothing of it was handled since the last seek."""

    def __init__(
        self,
        kafka: KafkaSettings,
        next_offset: Callable[[int], int | None],
        topic: topics.Topic = topics.SEGMENTS,
    ) -> None:
        self._kafka, self._next_offset, self._topic = kafka, next_offset, topic
        # a worker that waits for an acknowledgement does not stand still
        self._stall_s = max(_STALL_S, kafka.publish_timeout_s + _MARGIN_S)
        self._looked_at = time.monotonic()
        self._away_since: float | None = None
        self._since: dict[int, tuple[int | None, float]] = {}

    async def look(self, app: faust.App) -> None:
        """Now and then. TransportError: a partition of ours stands still, or the broker stays away."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        from streams.faust_private import committed_offsets

        try:
            bounds = await asyncio.to_thread(log_bounds, self._kafka, [self._topic])
        except TransportError as away:
            self._away_since = now if self._away_since is None else self._away_since
            if time.monotonic() - self._away_since > self._kafka.publish_timeout_s:
                raise
            log.warning("broker_away", error=away)
            return
        self._away_since = None
        self.judge(
            {partition: found for (_, partition), found in bounds.items()}, committed_offsets(app), now
        )

    def judge(self, bounds: dict[int, tuple[int, int]], committed: dict[int, int | None], now: float) -> None:
        """`bounds`: the first offset that is left and the end; `committed`: of the assigned partitions."""
        self._since = {p: since for p, since in self._since.items() if p in committed}
        for partition, mark in committed.items():
            at = self._next_offset(partition)
            first, end = bounds.get(partition, (0, 0))
            behind = end > max(first, at if at is not None else mark or 0)
            known, since = self._since.get(partition, (at, now))
            if not behind or known != at:
                since = now
            self._since[partition] = at, since
            if now - since > self._stall_s:
                raise TransportError(
                    f"partition {partition} has records and none arrives", partition=partition, next_offset=at
                )
