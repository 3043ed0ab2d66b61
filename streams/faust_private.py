"""The one module that relies on private methods of Faust 0.15.3 (pinned): a consumer that commits low-water marks.

Faust commits what its streams have acknowledged, whether or not the outputs reached the broker, and loses data that way.
Here the agent's acknowledgements mean nothing: the committed offset of a partition is the mark that its owner gives.

* `_new_offset`: the mark, instead of the highest acknowledged offset;
* `perform_seek`: Faust seeks to the committed offsets at every assignment; the owner's state goes before that, and the
  owner may wait (for the closed attempts) before records flow again;
* `getmany`: one message per fetched chunk of a partition, its value the list of records, because a Faust event costs ten
  times what a record costs; Faust's own read offsets and gaps are kept out of it, for chunks would confuse them.

A chunk carries the number of the seek behind which it was fetched: one from before the newest seek is read again and
must not be handled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

import faust
from faust.transport.drivers.aiokafka import Consumer
from faust.types import TP, ConsumerMessage

TESTED_WITH = "0.15.3"


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

    def _new_offset(self, tp: TP) -> int | None:
        self._acked[tp].clear()
        self._acked_index[tp].clear()
        return self.owner.low_water(tp.partition)

    async def perform_seek(self) -> None:
        await super().perform_seek()
        # in the same step of the loop as the seek's end: what arrives from here on was fetched behind it
        self.seeks += 1
        self.owner.forget()
        await self.owner.prepare()

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:  # noqa: ASYNC109
        records, active = await self._wait_next_records(timeout)
        seek, generation = self.seeks, self.app.consumer_generation_id
        if not records or self.should_stop:
            return
        for tp, batch in records.items():
            for start in range(0, len(batch), self.chunk_records):
                # a rebalance stops the flow, and what is dropped here is read again behind its seek
                if (
                    not self.flow_active
                    or self.seeks != seek
                    or self.app.consumer_generation_id != generation
                ):
                    return
                if active is not None and tp not in active and tp not in self._buffered_partitions:
                    continue
                self._read_offset[tp] = None  # our own offsets decide what was handled
                yield tp, self._chunk(tp, batch[start : start + self.chunk_records])

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
    bound = type("BoundConsumer", (LowWaterConsumer,), {"owner": owner, "chunk_records": chunk_records})
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
