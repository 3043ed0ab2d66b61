"""The one module that relies on private methods of Faust 0.15.3 (pinned): a consumer that commits low-water marks.

Faust commits what its streams have acknowledged, whether or not the outputs reached the broker, and loses data that way.
Here the agent's acknowledgements mean nothing: the committed offset of a partition is the mark that its owner gives.

* `_new_offset`: the mark, instead of the highest acknowledged offset;
* `perform_seek`: Faust calls it at every assignment. The owner's state goes, and the owner may wait (for the closed
  attempts) before records flow again. The seek that counts is our own, at the next `getmany` (`_seek_for_good` says why);
* `getmany`: one message per fetched chunk of a partition, its value the list of records, because a Faust event costs ten
  times what a record costs; Faust's own read offsets and gaps are kept out of it, for chunks would confuse them. Records
  follow each other without a gap, or the process ends.

A chunk carries the number of the seek behind which it was fetched: one from before the newest seek is read again and
must not be handled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

import faust
import structlog
from aiokafka.errors import IllegalStateError
from faust.transport.drivers.aiokafka import Consumer
from faust.types import TP, ConsumerMessage

from schemas.errors import InvariantBroken

TESTED_WITH = "0.15.3"
log = structlog.get_logger()


class Chunk(NamedTuple):
    """Records of one partition in offset order (aiokafka's ConsumerRecord), fetched behind the seek number `seek`."""

    partition: int
    seek: int
    records: Sequence[Any]


class MarkOwner(Protocol):
    """Who knows how far a partition is safely handled."""

    def low_water(self, partition: int) -> int | None:
        """The offset to commit; None: nothing yet."""

    def forget(self) -> None:
        """Every partition is about to be read again from its committed mark."""

    async def prepare(self) -> None:
        """Wait for whatever must be known before records are handled."""


class LowWaterConsumer(Consumer):
    """Faust's aiokafka consumer with marks instead of acknowledgements. Made by `install`."""

    owner: MarkOwner
    chunk_records: int
    seeks = 0
    _must_seek = False
    _next: dict[TP, int | None]  # what comes next of each partition; None: its beginning

    def _new_offset(self, tp: TP) -> int | None:
        self._acked[tp].clear()
        self._acked_index[tp].clear()
        return self.owner.low_water(tp.partition)

    async def perform_seek(self) -> None:
        await super().perform_seek()
        # the parent has just filled `_read_offset` with the committed offsets
        self._next = {tp: self._read_offset[tp] for tp in self.assignment()}
        self._must_seek = True
        self.seeks += 1
        self.owner.forget()
        await self.owner.prepare()

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:  # noqa: ASYNC109
        if self._must_seek and not await self._seek_for_good():
            return
        before = self.seeks, self.app.consumer_generation_id
        records, active = await self._wait_next_records(timeout)
        if not records or self.should_stop:
            return
        for tp, batch in records.items():
            if not await self._follows(tp, batch[0].offset):
                return
            for start in range(0, len(batch), self.chunk_records):
                fetchable = active is None or tp in active or tp in self._buffered_partitions
                now = self.seeks, self.app.consumer_generation_id
                if not (fetchable and self.flow_active and now == before):
                    self._must_seek = True  # what is dropped here has to be fetched again
                    return
                chunk = batch[start : start + self.chunk_records]
                self._next[tp] = chunk[-1].offset + 1
                self._read_offset[tp] = None  # our own offsets decide what was handled
                yield tp, self._chunk(tp, chunk)

    async def _seek_for_good(self) -> bool:
        """Seek every partition to what comes next; False: not now.

        A fetch that was under way during a rebalance returns records of the new assignment while the flow is stopped; they
        are dropped. Seeking to the committed offset does not bring them back where nothing was committed, nor where they
        were fetched behind that seek. Here no fetch is under way: only `getmany` fetches.
        """
        if not self.flow_active:
            await self.wait(self.can_resume_flow)  # type: ignore[arg-type]
        before = self.seeks
        places = {tp: self._next.get(tp) for tp in self.assignment()}
        try:
            if beginnings := [tp for tp, at in places.items() if at is None]:
                places.update(await self.earliest_offsets(*beginnings))
            await self.seek_wait({tp: at or 0 for tp, at in places.items()})
        except IllegalStateError:  # the partitions went away meanwhile; the rebalance seeks again
            await self.sleep(0.05)
            return False
        if self.should_stop or not self.flow_active or self.seeks != before:
            return False
        self._next.update(places)
        self._must_seek = False
        return True

    async def _follows(self, tp: TP, offset: int) -> bool:
        """Whether nothing was left out before `offset`; else InvariantBroken, or False when a rebalance is under way."""
        expected = self._next.get(tp)
        if expected is None or offset <= expected:
            return True
        before = self.seeks
        earliest = (await self.earliest_offsets(tp)).get(tp, 0)
        if self.seeks != before or not self.flow_active:
            self._must_seek = True
            return False
        if earliest <= expected:
            raise InvariantBroken(
                f"the client left out records of {tp.topic}/{tp.partition}", expected=expected, found=offset
            )
        log.warning(
            "records_were_deleted",
            topic=tp.topic,
            partition=tp.partition,
            expected=expected,
            first_left=earliest,
        )
        return True  # nobody will ever read them

    def _chunk(self, tp: TP, records: Sequence[Any]) -> ConsumerMessage:
        last = records[-1]
        value: Any = Chunk(tp.partition, self.seeks, records)  # the raw codec hands it on as it is
        return ConsumerMessage(
            tp.topic, tp.partition, last.offset, last.timestamp / 1000.0, last.timestamp_type, [], None,
            value, None, None, None, tp,
            generation_id=self.app.consumer_generation_id,
        )  # fmt: skip


def install(app: faust.App, owner: MarkOwner, chunk_records: int) -> None:
    """Make the app's consumer one that asks `owner`. Before the app starts."""
    bound = type(
        "BoundConsumer", (LowWaterConsumer,), {"owner": owner, "chunk_records": chunk_records, "_next": {}}
    )
    app.transport.Consumer = bound  # type: ignore[misc]


def is_current(app: faust.App, chunk: Chunk) -> bool:
    """Whether the chunk was fetched behind the newest seek."""
    return chunk.seek == _consumer(app).seeks


def read_to_end(app: faust.App, topic: str, partition: int, next_offset: int) -> bool:
    """Whether a partition of ours holds nothing behind `next_offset`, as far as the last fetch knows."""
    consumer, place = _consumer(app), TP(topic, partition)
    if place not in consumer.assignment():
        return False
    end: int | None = consumer.highwater(place)
    return end is not None and next_offset >= end


def committed_offsets(app: faust.App) -> dict[int, int | None]:
    """Of every partition that is assigned: the mark that was committed last, if any."""
    consumer = _consumer(app)
    committed = consumer._committed_offset  # noqa: SLF001 — what this module is for
    return {tp.partition: committed.get(tp) for tp in consumer.assignment()}


def _consumer(app: faust.App) -> LowWaterConsumer:
    assert isinstance(app.consumer, LowWaterConsumer)
    return app.consumer
