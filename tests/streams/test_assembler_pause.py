"""A run that lay still for longer than sessions are looked for: what is read again was closed before that."""

from __future__ import annotations

import time
import uuid

import pytest
from assembler_sessions import RUN, Session
from confluent_kafka import Consumer, Producer, TopicPartition

from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import topics
from schemas.codec import encode
from schemas.events import Event
from schemas.ids import worker_group
from schemas.settings import KafkaSettings
from schemas.topics import TOPIC_OF, key_of
from streams.assembler_follower import ClosedFollower, read_again_since
from streams.assembly_closed import Attempt, ClosedAttempts

pytestmark = pytest.mark.broker
HOUR_MS = 3_600_000
DAY_S = 24 * 3600.0


@pytest.fixture
def log(kafka: str) -> KafkaSettings:
    settings = KafkaSettings(bootstrap_servers=kafka, topic_prefix=uuid.uuid4().hex[:8], partitions=1)
    create_topics(settings)
    return settings


def write(log: KafkaSettings, event: Event, at_ms: int) -> None:
    producer = Producer({"bootstrap.servers": log.bootstrap_servers})
    name = TOPIC_OF[type(event)].full_name(log.topic_prefix)
    producer.produce(name, encode(event), key=key_of(event), partition=0, timestamp=at_ms)
    assert producer.flush(20) == 0


def commit(log: KafkaSettings, group: str, offset: int) -> None:
    consumer = Consumer({"bootstrap.servers": log.bootstrap_servers, "group.id": group})
    spot = TopicPartition(topics.SEGMENTS.full_name(log.topic_prefix), 0, offset)
    consumer.commit(offsets=[spot], asynchronous=False)
    consumer.close()


async def test_attempts_that_were_closed_before_the_pause_are_known_behind_it(log: KafkaSettings) -> None:
    now, group = int(time.time() * 1000), worker_group(log.topic_prefix, RUN, "assembler")
    friday = now - 64 * HOUR_MS
    for event in (Session("g").claim(), Session("h").claim()):
        write(log, event, friday)
    write(
        log,
        ev.GroupFailed(run_id=RUN, occurred_at=1, group_id="g", attempt=0, reason="timeout"),
        friday - HOUR_MS,
    )
    commit(log, group, 1)
    closed = ClosedAttempts(RUN)
    follower = ClosedFollower(log, group, DAY_S, closed, lambda failure: pytest.fail(str(failure)))
    await follower.catch_up()
    follower.close()
    assert Attempt("g", 0) in closed


def test_without_a_pause_only_the_age_of_a_session_is_looked_back(log: KafkaSettings) -> None:
    now, group = int(time.time() * 1000), worker_group(log.topic_prefix, RUN, "assembler")
    day_ms = 24 * HOUR_MS
    assert read_again_since(log, group, DAY_S, now) == now - day_ms
    write(log, Session("old").claim(), now - 64 * HOUR_MS)
    assert read_again_since(log, group, DAY_S, now) == now - 64 * HOUR_MS - day_ms  # nothing was committed
    commit(log, group, 1)
    assert read_again_since(log, group, DAY_S, now) == now - day_ms
    write(log, Session("new").claim(), now - HOUR_MS)
    assert read_again_since(log, group, DAY_S, now) == now - day_ms
