"""Reading by explicit offsets, and following, on a real broker."""

from __future__ import annotations

import threading
import time
import uuid

import pytest
from confluent_kafka import Consumer, TopicPartition

from journal.event_log import EventFollower, read_events
from journal.producer import AckProducer
from journal.reader import Record, TopicReader, end_offsets, log_bounds, offsets_at_time, record_at
from journal.record_deletion import committed_offsets, delete_before
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import topics
from schemas.errors import SchemaError, TransportError, UnknownEvent
from schemas.settings import KafkaSettings

pytestmark = pytest.mark.broker


def alarm(number: int) -> ev.Alarm:
    return ev.identified(ev.Alarm(run_id="r", occurred_at=number, name="n", message=""))


def fill(log: KafkaSettings, numbers: range) -> None:
    producer = AckProducer(log, "test")
    for number in numbers:
        producer.send(alarm(number))
    producer.close()


def test_a_start_offset_is_the_next_one_to_read(log: KafkaSettings) -> None:
    fill(log, range(5))
    reader = TopicReader(log, [topics.CONTROL], start={("control.v1", 0): 3})
    assert [record.offset for record in reader.read_to_end()] == [3, 4]
    assert reader.positions() == {("control.v1", 0): 5}
    reader.close()


def test_read_to_end_stops_at_the_end_of_its_call_and_loses_nothing(log: KafkaSettings) -> None:
    fill(log, range(3))
    reader = TopicReader(log, [topics.CONTROL])
    iterator = reader.read_to_end()
    seen = [next(iterator).offset]
    fill(log, range(3, 6))
    seen += [record.offset for record in iterator]
    assert seen == [0, 1, 2]
    rest: list[Record] = []
    while len(rest) < 3:
        rest += reader.poll(10)
    assert [record.offset for record in rest] == [3, 4, 5]
    reader.close()


def test_an_iterator_left_early_gives_the_rest_to_the_next_poll(log: KafkaSettings) -> None:
    fill(log, range(4))
    reader = TopicReader(log, [topics.CONTROL])
    iterator = reader.read_to_end()
    assert next(iterator).offset == 0
    iterator.close()  # type: ignore[attr-defined]
    assert reader.positions() == {("control.v1", 0): 1}
    assert [record.offset for record in reader.read_to_end()] == [1, 2, 3]
    reader.close()


@pytest.mark.parametrize(("start", "deleted", "seen"), [(1, 3, [3, 4]), (1, 5, []), (4, 3, [4])])
def test_what_was_deleted_is_passed_over_and_the_offsets_say_so(
    log: KafkaSettings, start: int, deleted: int, seen: list[int]
) -> None:
    fill(log, range(5))
    assert delete_before(log, topics.CONTROL, {0: deleted}) == {0: deleted}
    reader = TopicReader(log, [topics.CONTROL], start={("control.v1", 0): start})
    assert [record.offset for record in reader.read_to_end()] == seen
    assert reader.first_offsets() == {("control.v1", 0): deleted}
    assert reader.positions() == {("control.v1", 0): 5}
    reader.close()
    assert log_bounds(log, [topics.CONTROL]) == {("control.v1", 0): (deleted, 5)}


def test_what_is_deleted_while_it_is_read_does_not_hold_the_reader(log: KafkaSettings) -> None:
    fill(log, range(5))
    reader = TopicReader(log, [topics.CONTROL])
    iterator = reader.read_to_end()  # asks for the end at the first record
    fill(log, range(5, 2000))
    first = next(iterator)
    delete_before(log, topics.CONTROL, {0: 2000})
    rest = [record.offset for record in iterator]
    assert [first.offset, *rest] == list(range(len(rest) + 1))  # as far as it was on its way
    fill(log, range(1))
    late: list[Record] = []
    while not late:
        late = [record for record in reader.poll(5) if record.offset >= 2000]
    assert late[0].offset == 2000
    reader.close()


def test_a_group_says_how_far_it_is_per_partition(log: KafkaSettings) -> None:
    assert committed_offsets(log, "nobody", topics.SEGMENTS) == {}
    client = Consumer({"bootstrap.servers": log.bootstrap_servers, "group.id": log.topic_prefix})
    name = topics.SEGMENTS.full_name(log.topic_prefix)
    client.commit(offsets=[TopicPartition(name, 2, 7)], asynchronous=False)
    client.close()
    assert committed_offsets(log, log.topic_prefix, topics.SEGMENTS) == {2: 7}


def test_chosen_partitions_only(log: KafkaSettings) -> None:
    reader = TopicReader(log, [topics.SEGMENTS], partitions={"rollout.segments.v1": [2]})
    assert set(reader.end_offsets()) == {("rollout.segments.v1", 2)}
    reader.close()


def test_a_missing_topic_is_a_transport_error(kafka: str) -> None:
    with pytest.raises(TransportError, match=r"nowhere\.control\.v1"):
        TopicReader(KafkaSettings(bootstrap_servers=kafka, topic_prefix="nowhere"), [topics.CONTROL])


def test_offsets_at_time_are_the_first_not_older_or_the_end(log: KafkaSettings) -> None:
    fill(log, range(3))
    assert offsets_at_time(log, topics.CONTROL, 0) == {0: 0}
    assert offsets_at_time(log, topics.CONTROL, 2**42) == {0: 3}


def test_an_undecodable_record_goes_to_the_callback_and_reading_goes_on(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    producer.publish(alarm(1))
    producer.send_raw(topics.CONTROL, b"r", b"no event").result(10)
    producer.publish(alarm(2))
    bad: list[tuple[int, SchemaError]] = []
    reader = TopicReader(log, [topics.CONTROL])
    events = list(read_events(reader.read_to_end(), lambda record, wrong: bad.append((record.offset, wrong))))
    assert [event for _, event in events] == [alarm(1), alarm(2)]
    assert [(offset, type(wrong)) for offset, wrong in bad] == [(1, UnknownEvent)]
    reader.close()
    producer.close()


def test_a_follower_hands_over_the_past_and_then_what_comes(log: KafkaSettings) -> None:
    fill(log, range(2))
    follower = EventFollower(log, [topics.CONTROL])
    seen: list[ev.Event] = []
    changed = threading.Condition()

    def note(_: Record, event: ev.Event) -> None:
        with changed:
            seen.append(event)
            changed.notify_all()

    follower.follow(note, pytest.fail)
    assert follower.wait_caught_up(20)
    assert seen[:2] == [alarm(0), alarm(1)]
    fill(log, range(2, 4))
    with changed:
        assert changed.wait_for(lambda: len(seen) == 4, timeout=20)
    follower.close()
    assert seen == [alarm(n) for n in range(4)]


def test_a_polled_follower_is_caught_up_when_it_handed_out_what_was_there(log: KafkaSettings) -> None:
    fill(log, range(2))
    follower = EventFollower(log, [topics.CONTROL])
    assert not follower.caught_up()
    events: list[ev.Event] = []
    deadline = time.monotonic() + 20
    while not follower.caught_up() and time.monotonic() < deadline:
        events += [event for _, event in follower.poll(1.0)]
    assert events == [alarm(0), alarm(1)]
    follower.close()


def test_end_offsets_of_several_topics(log: KafkaSettings) -> None:
    fill(log, range(3))
    ends = end_offsets(log, [topics.CONTROL, topics.SEGMENTS])
    assert ends["control.v1", 0] == 3
    assert sum(ends.values()) == 3
    assert len(ends) == 1 + log.partitions


def test_a_reader_that_starts_beyond_the_end_closes(log: KafkaSettings) -> None:
    """Often, as the client fails to close one time in some hundreds when it resets an offset meanwhile."""
    fill(log, range(3))
    assert [record_at(log, topics.CONTROL, 0, 900) for _ in range(2000)] == [None] * 2000
    there = record_at(log, topics.CONTROL, 0, 2)
    assert there is not None
    assert there.offset == 2


def test_offsets_of_a_topic_that_was_just_made_are_found(kafka: str) -> None:
    """Its partitions have leaders by the metadata, and the leaders do not know of it for a moment."""
    for _ in range(3):
        fresh = KafkaSettings(
            bootstrap_servers=kafka, topic_prefix=f"fresh-{uuid.uuid4().hex[:6]}", partitions=32
        )
        create_topics(fresh, [topics.SEGMENTS])
        assert offsets_at_time(fresh, topics.SEGMENTS, 0) == dict.fromkeys(range(32), 0)
