"""What `faust_private` relies on: each test fails when another version of Faust changes it."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faust
import pytest
from faust.transport.consumer import Consumer as BaseConsumer
from faust.transport.drivers.aiokafka import Consumer
from faust.types import TP

from schemas.errors import InvariantBroken
from streams.faust_private import TESTED_WITH, Chunk, LowWaterConsumer, install, is_current

SEGMENTS = TP("segments", 0)


class Owner:
    """Marks as the test sets them."""

    def __init__(self) -> None:
        self.marks: dict[int, int | None] = {}
        self.said: list[str] = []

    def low_water(self, partition: int) -> int | None:
        return self.marks.get(partition)

    def forget(self) -> None:
        self.said.append("forget")

    async def prepare(self) -> None:
        self.said.append("prepare")


class Fetched:
    """A record of aiokafka, as far as a chunk needs it."""

    timestamp, timestamp_type = 1000, 0

    def __init__(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
async def app(owner: Owner, tmp_path: Path) -> faust.App:
    app = faust.App(
        "test", broker="kafka://127.0.0.1:1", datadir=str(tmp_path / "faust"), topic_disable_leader=True
    )
    install(app, owner, chunk_records=2)
    app.finalize()
    return app


def consumer_of(app: faust.App) -> LowWaterConsumer:
    consumer = app.consumer
    assert isinstance(consumer, LowWaterConsumer)
    return consumer


def test_the_version_is_the_one_that_was_read() -> None:
    assert importlib.metadata.version("faust-streaming") == TESTED_WITH


def test_the_methods_that_are_replaced_are_where_they_were() -> None:
    for name, arguments in {
        "_new_offset": ["self", "tp"], "perform_seek": ["self"], "getmany": ["self", "timeout"],
        "_wait_next_records": ["self", "timeout"], "_should_commit": ["self", "tp", "offset"],
    }.items():  # fmt: skip
        assert list(inspect.signature(getattr(BaseConsumer, name)).parameters) == arguments, name
    # who calls them, and that nothing in between was overridden by the driver
    assert "self._new_offset(tp)" in inspect.getsource(BaseConsumer._filter_committable_offsets)
    assert "self._acked" in inspect.getsource(BaseConsumer._filter_tps_with_pending_acks)
    assert Consumer._new_offset is BaseConsumer._new_offset
    assert Consumer.getmany is BaseConsumer.getmany


async def test_the_app_makes_the_bound_consumer(app: faust.App, owner: Owner) -> None:
    assert consumer_of(app).owner is owner


async def test_what_is_committed_is_the_mark_whatever_was_acknowledged(app: faust.App, owner: Owner) -> None:
    consumer = consumer_of(app)
    consumer._acked[SEGMENTS] = [0, 1, 2, 3]
    consumer._acked_index[SEGMENTS] = {0, 1, 2, 3}
    owner.marks[0] = 2
    assert consumer._filter_committable_offsets([SEGMENTS]) == {SEGMENTS: 2}
    assert list(consumer._filter_tps_with_pending_acks()) == [SEGMENTS]
    assert (consumer._acked[SEGMENTS], consumer._acked_index[SEGMENTS]) == ([], set())
    owner.marks[0] = None
    assert consumer._filter_committable_offsets([SEGMENTS]) == {}


async def test_the_mark_is_committed_once(app: faust.App, owner: Owner) -> None:
    consumer = consumer_of(app)
    consumer._committed_offset[SEGMENTS] = 2
    owner.marks[0] = 2
    assert consumer._filter_committable_offsets([SEGMENTS]) == {}
    owner.marks[0] = 3
    assert consumer._filter_committable_offsets([SEGMENTS]) == {SEGMENTS: 3}


async def test_a_seek_drops_the_state_and_then_waits_for_the_owner(
    app: faust.App, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_of(app)

    async def committed() -> dict[TP, int]:
        assert owner.said == []
        return {SEGMENTS: 5}

    monkeypatch.setattr(consumer, "seek_to_committed", committed)
    monkeypatch.setattr(consumer, "assignment", lambda: {SEGMENTS})
    old = Chunk(0, consumer.seeks, [])
    await consumer.perform_seek()
    assert owner.said == ["forget", "prepare"]
    assert consumer._committed_offset[SEGMENTS] == 5
    assert not is_current(app, old)


async def chunks(
    consumer: LowWaterConsumer, fetched: dict[TP, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    async def wait(timeout: float) -> tuple[dict[TP, list[Any]], set[TP]]:  # noqa: ASYNC109
        return fetched, set(fetched)

    monkeypatch.setattr(consumer, "_wait_next_records", wait)
    async for tp, message in consumer.getmany(1.0):
        yield tp, message


async def test_records_come_in_chunks_of_one_partition(
    app: faust.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_of(app)
    consumer._read_offset[SEGMENTS] = 99  # Faust's own filter would drop what is read again
    fetched = {SEGMENTS: [Fetched(10), Fetched(11), Fetched(12)], TP("segments", 1): [Fetched(3)]}
    taken = chunks(consumer, fetched, monkeypatch)
    seen = [(message.offset, [r.offset for r in message.value.records]) async for _, message in taken]
    assert seen == [(11, [10, 11]), (12, [12]), (3, [3])]
    assert consumer._read_offset[SEGMENTS] is None


class Seeks:
    """What the consumer asks the driver for, with partitions 0 and 1 assigned and records from 3 on at the broker."""

    def __init__(self, consumer: LowWaterConsumer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sought: list[dict[TP, int]] = []
        self.earliest = 3
        monkeypatch.setattr(consumer, "assignment", lambda: {SEGMENTS, TP("segments", 1)})
        monkeypatch.setattr(consumer, "seek_wait", self.seek_wait)
        monkeypatch.setattr(consumer, "earliest_offsets", self.earliest_offsets)
        monkeypatch.setattr(consumer, "seek_to_committed", self.seek_to_committed)

    async def seek_to_committed(self) -> dict[TP, int | None]:
        return {SEGMENTS: 10, TP("segments", 1): None}

    async def seek_wait(self, places: dict[TP, int]) -> None:
        self.sought.append(dict(places))

    async def earliest_offsets(self, *tps: TP) -> dict[TP, int]:
        return dict.fromkeys(tps, self.earliest)


async def test_after_an_assignment_every_partition_is_sought_also_where_nothing_was_committed(
    app: faust.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_of(app)
    driver = Seeks(consumer, monkeypatch)
    await consumer.perform_seek()
    seen = [
        m.offset
        async for _, m in chunks(
            consumer, {SEGMENTS: [Fetched(10)], TP("segments", 1): [Fetched(3)]}, monkeypatch
        )
    ]
    assert driver.sought == [{SEGMENTS: 10, TP("segments", 1): 3}]
    assert seen == [10, 3]


async def test_what_a_stopped_flow_dropped_is_sought_again(
    app: faust.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_of(app)
    driver = Seeks(consumer, monkeypatch)
    await consumer.perform_seek()
    fetched = {SEGMENTS: [Fetched(n) for n in range(10, 14)]}
    async for _ in chunks(consumer, fetched, monkeypatch):
        consumer.flow_active = False  # behind the first chunk of two records
    consumer.resume_flow()
    again = [m.offset async for _, m in chunks(consumer, {SEGMENTS: fetched[SEGMENTS][2:]}, monkeypatch)]
    assert driver.sought[-1][SEGMENTS] == 12
    assert again == [13]


async def test_records_left_out_by_the_client_end_the_process(
    app: faust.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_of(app)
    Seeks(consumer, monkeypatch)
    await consumer.perform_seek()
    with pytest.raises(InvariantBroken, match="left out"):
        _ = [m async for _, m in chunks(consumer, {SEGMENTS: [Fetched(11)]}, monkeypatch)]


async def test_records_deleted_at_the_broker_are_passed_over(
    app: faust.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_of(app)
    driver = Seeks(consumer, monkeypatch)
    await consumer.perform_seek()
    driver.earliest = 50
    seen = [m.offset async for _, m in chunks(consumer, {SEGMENTS: [Fetched(50)]}, monkeypatch)]
    assert seen == [50]


@pytest.mark.parametrize("change", ["flow", "seek", "generation"])
async def test_a_rebalance_in_the_middle_stops_the_chunks(
    app: faust.App, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    consumer = consumer_of(app)
    seen = []
    async for _, message in chunks(consumer, {SEGMENTS: [Fetched(n) for n in range(6)]}, monkeypatch):
        seen.append(message.offset)
        if change == "flow":
            consumer.flow_active = False
        elif change == "seek":
            consumer.seeks += 1
        else:
            app.consumer_generation_id += 1
    assert seen == [1]


async def test_a_chunk_passes_the_raw_codec_unchanged(app: faust.App) -> None:
    topic = app.topic(
        "segments", key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
    )
    chunk = Chunk(0, 0, [Fetched(1)])
    message = SimpleNamespace(key=None, value=chunk, headers=[])
    event = await topic.decode(message)  # type: ignore[arg-type]
    assert event.value is chunk
