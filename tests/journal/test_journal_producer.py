"""Acknowledged produce on a real broker."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from journal.producer import AckProducer, Position
from journal.reader import TopicReader
from journal.topic_admin import partition_of
from schemas import events as ev
from schemas import topics
from schemas.codec import decode
from schemas.errors import ConfigError, PublishFailed, PublishTimeout
from schemas.settings import KafkaSettings

pytestmark = pytest.mark.broker


def alarm(number: int, message: str = "") -> ev.Alarm:
    return ev.identified(ev.Alarm(run_id="r", occurred_at=number, name="n", message=message))


def test_publish_returns_the_place_in_the_log(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    assert [producer.publish(alarm(i)) for i in range(3)] == [Position(0, 0), Position(0, 1), Position(0, 2)]
    producer.close()
    reader = TopicReader(log, [topics.CONTROL])
    assert [decode(record.value) for record in reader.read_to_end()] == [alarm(0), alarm(1), alarm(2)]
    reader.close()


def test_records_of_one_key_stand_in_the_partition_that_partition_of_names(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    for number in range(12):
        group = f"group-{number}"
        request = ev.identified(
            ev.GroupRequested(
                run_id="r",
                occurred_at=1,
                group_id=group,
                attempt=0,
                group_size=2,
                prompt_index=0,
                dataset_epoch=0,
            )
        )
        assert producer.publish(request).partition == partition_of(group.encode(), log.partitions)
    producer.close()


async def test_concurrent_acknowledgements_reach_their_own_callers_in_order(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    places = await asyncio.gather(*(producer.apublish(alarm(i)) for i in range(500)))
    assert [place.offset for place in places] == list(range(500))
    producer.close()


async def test_a_refused_record_is_publish_failed_for_its_caller_alone(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    small, large = await asyncio.gather(
        producer.apublish(alarm(1)), producer.apublish(alarm(2, "x" * 9_000_000)), return_exceptions=True
    )
    assert small == Position(0, 0)
    assert isinstance(large, PublishFailed)


def test_post_tells_of_each_record_and_flush_returns_when_all_are_told(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    told: dict[int, object] = {}
    for number in range(300):
        producer.post(alarm(number), partial(told.__setitem__, number))
    producer.post(alarm(300, "x" * 9_000_000), partial(told.__setitem__, 300))
    with pytest.raises(PublishFailed):
        producer.flush()
    assert isinstance(told.pop(300), PublishFailed)
    assert told == {number: Position(0, number) for number in range(300)}
    producer.close()


def test_flush_raises_what_failed_of_records_that_nobody_asks_for(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    producer.post(alarm(1, "x" * 9_000_000))
    with pytest.raises(PublishFailed):
        producer.flush()
    producer.post(alarm(2))
    producer.close()
    reader = TopicReader(log, [topics.CONTROL])
    assert [decode(record.value) for record in reader.read_to_end()] == [alarm(2)]
    reader.close()


def test_flush_raises_what_failed_since_since_the_last_flush(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    producer.send(alarm(1, "x" * 9_000_000))
    with pytest.raises(PublishFailed):
        producer.flush()
    producer.send(alarm(2))
    producer.flush()
    producer.close()


def test_an_absent_broker_is_publish_timeout_because_nobody_knows() -> None:
    away = KafkaSettings(bootstrap_servers="127.0.0.1:1", publish_timeout_s=0.5)
    producer = AckProducer(away, "test")
    with pytest.raises(PublishTimeout):
        producer.publish(alarm(1))


def test_a_closed_producer_refuses(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    producer.close()
    with pytest.raises(PublishFailed):
        producer.publish(alarm(1))


def test_without_bootstrap_servers_the_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kafka\.bootstrap_servers"):
        AckProducer(KafkaSettings(), "test")


def test_raw_bytes_and_headers_arrive_as_they_are(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    producer.send_raw(topics.SEGMENTS, b"key", b"\x00raw", {"source": b"x"}).result(10)
    producer.close()
    reader = TopicReader(log, [topics.SEGMENTS])
    (record,) = reader.read_to_end()
    assert (record.key, record.value, record.headers) == (b"key", b"\x00raw", {"source": b"x"})
    reader.close()
