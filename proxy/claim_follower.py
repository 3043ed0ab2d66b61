"""Reads the segments topic for claims: in a thread, from given offsets on, without decoding anything else.

What was read is handed to the event loop once per batch: per partition the offset behind it, and the claims in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from journal.reader import Record, TopicReader, end_offsets, newest_time_ms
from proxy.ownership import Ownership, SeenClaim
from schemas.codec import decode, headers_of
from schemas.errors import HoofprintError, SchemaError, TransportError
from schemas.events import SessionClaimed
from schemas.settings import KafkaSettings
from schemas.topics import SEGMENTS

log = structlog.get_logger(__name__)

_POLL_S = 0.2
_REST_S = 5.0
OnSeen = Callable[[Mapping[int, int], Iterable[SeenClaim]], None]


class ClaimFollower:
    """The adapter of `ownership.Follower`. `on_seen` and `on_failure` are called in the event loop."""

    def __init__(
        self, kafka: KafkaSettings, on_seen: OnSeen, on_failure: Callable[[TransportError], None]
    ) -> None:
        self._kafka = kafka
        self._on_seen = on_seen
        self._on_failure = on_failure
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, offsets: Mapping[int, int]) -> None:
        """Read on from here."""
        stop = self._stop = threading.Event()
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(dict(offsets), stop, loop), name="claims", daemon=True
        )
        self._thread.start()
        log.info("claims_followed", partitions=len(offsets))

    async def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 5.0)

    def _run(self, offsets: dict[int, int], stop: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        try:
            start = {(SEGMENTS.name, partition): offset for partition, offset in offsets.items()}
            reader = TopicReader(self._kafka, [SEGMENTS], start, {SEGMENTS.name: sorted(offsets)})
            try:
                while not stop.is_set():
                    records = reader.poll(_POLL_S)
                    if records and not stop.is_set():
                        loop.call_soon_threadsafe(self._on_seen, *_looked_at(records))
            finally:
                reader.close()
        except HoofprintError as failure:
            broken = failure if isinstance(failure, TransportError) else TransportError(failure.message)
            loop.call_soon_threadsafe(self._on_failure, broken)


def _looked_at(records: Sequence[Record]) -> tuple[dict[int, int], list[SeenClaim]]:
    """The offset behind the last record of each partition, and the claims. Order within a partition is the log's."""
    headers = headers_of(SessionClaimed)
    ends: dict[int, int] = {}
    claims = []
    for record in records:
        ends[record.partition] = record.offset + 1
        if not record.value.startswith(headers):
            continue
        try:
            event = decode(record.value)
        except SchemaError as wrong:
            log.warning("undecodable_record", error=wrong)
            continue
        if isinstance(event, SessionClaimed):
            claims.append(SeenClaim(record.partition, record.offset, event.session_id, event.epoch))
    return ends, claims


async def begin(ownership: Ownership, kafka: KafkaSettings) -> None:
    """Ask the log where it ends now, and how new its newest record is. TransportError: no log."""
    ends = await asyncio.to_thread(end_offsets, kafka, [SEGMENTS])
    newest = await asyncio.to_thread(newest_time_ms, kafka, SEGMENTS)
    follower = ClaimFollower(kafka, ownership.saw, ownership.broke)
    ownership.begin({partition: end for (_, partition), end in ends.items()}, newest, follower)


async def watch(ownership: Ownership) -> None:
    """Until cancelled: end a follower that nobody needs any more."""
    while True:
        await asyncio.sleep(_REST_S)
        await ownership.rest()
