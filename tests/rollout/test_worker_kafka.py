"""The worker on a real broker: what it plays, what it leaves alone, and what a restarted one plays again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from journal.producer import AckProducer
from journal.topic_admin import create_topics
from rollout.agent_api import Agent, Finish, Task
from rollout.answers import AnswerLog
from rollout.client import ProxyClient
from rollout.group_run import GroupPlayer
from rollout.worker import Worker
from schemas.events import Event, GroupRequested, Verdict, identified
from schemas.settings import Settings
from schemas.topics import DEAD_LETTERS, PROMPTS

pytestmark = pytest.mark.broker


@pytest.fixture
def settings(kafka: str, tmp_path: Path) -> Settings:
    run = f"w{uuid.uuid4().hex[:8]}"
    made = Settings.model_validate(
        {
            "run": {"run_id": run, "directory": str(tmp_path)},
            "kafka": {"bootstrap_servers": kafka, "topic_prefix": run, "partitions": 2},
        }
    )
    create_topics(made.kafka)
    return made


@pytest.fixture
def publish(settings: Settings) -> Any:
    producer = AckProducer(settings.kafka, "test")

    def send(*events: Event) -> None:
        for event in events:
            producer.publish(identified(event))

    yield send
    producer.close()


def request(settings: Settings, group: str, attempt: int = 0) -> GroupRequested:
    return GroupRequested(
        run_id=settings.run.run_id, occurred_at=1, group_id=group, attempt=attempt, group_size=2,
        prompt_index=0, dataset_epoch=0, prompt='{"seed": 1}',
    )  # fmt: skip


def verdict(settings: Settings, group: str, outcome: Any) -> Verdict:
    return Verdict(
        run_id=settings.run.run_id, occurred_at=1, cause_offset=0, index=0, group_id=group, attempt=0,
        outcome=outcome, reason="stale",
    )  # fmt: skip


@asynccontextmanager
async def working(settings: Settings, proxy: Any, agent: Agent, tmp_path: Path) -> AsyncIterator[Worker]:
    client = ProxyClient(proxy.url, AnswerLog(tmp_path / "answers.jsonl"), patience_s=5.0)
    worker = Worker(settings, GroupPlayer(client, agent, 60.0))
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        assert await running == 0
        await client.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 — polls a broker and a peer, which set no event
            await asyncio.sleep(0.02)


def committed(settings: Settings) -> int:
    """Records of the prompts topic that a new worker would not read."""
    consumer = Consumer(
        {"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": f"{settings.run.run_id}-rollout"}
    )
    topic = PROMPTS.full_name(settings.kafka.topic_prefix)
    found = consumer.committed([TopicPartition(topic, p) for p in range(2)], timeout=10)
    consumer.close()
    return sum(max(0, spot.offset) for spot in found)


async def play_once(task: Task) -> Finish:
    await task.session.generate([1], {})
    return Finish(1.0)


async def wait_for_ever(task: Task) -> Finish:
    await task.session.generate([1], {})
    await asyncio.Event().wait()
    return Finish(0.0)


async def test_requested_groups_are_played_and_committed(
    settings: Settings, publish: Any, answering_proxy: Any, tmp_path: Path
) -> None:
    publish(*[request(settings, f"g{i}") for i in range(5)])
    async with working(settings, answering_proxy, play_once, tmp_path):
        await until(lambda: len(answering_proxy.finalized) == 10)
    assert committed(settings) == 5


async def test_an_unfinished_group_is_played_again_by_the_next_worker(
    settings: Settings, publish: Any, answering_proxy: Any, tmp_path: Path
) -> None:
    publish(request(settings, "g0"))
    async with working(settings, answering_proxy, wait_for_ever, tmp_path):
        await until(lambda: answering_proxy.calls["generate"] == 2)
    assert committed(settings) == 0
    async with working(settings, answering_proxy, play_once, tmp_path):
        await until(lambda: len(answering_proxy.finalized) == 2)
    assert committed(settings) == 1


async def test_a_decided_attempt_is_stopped_and_not_played_again(
    settings: Settings, publish: Any, answering_proxy: Any, tmp_path: Path
) -> None:
    publish(request(settings, "g0"))
    async with working(settings, answering_proxy, wait_for_ever, tmp_path):
        await until(lambda: answering_proxy.calls["generate"] == 2)
        publish(verdict(settings, "g0", "dropped"), request(settings, "g1"))
        await until(lambda: answering_proxy.calls["generate"] == 4)
    publish(request(settings, "g0"), verdict(settings, "g1", "retry"), request(settings, "g2"))
    async with working(settings, answering_proxy, play_once, tmp_path):
        await until(lambda: len(answering_proxy.finalized) == 2)
    assert {f["session_id"] for f in answering_proxy.finalized} == {"t-g2-0-0", "t-g2-0-1"}
    assert committed(settings) == 4


async def test_a_record_that_is_no_event_becomes_a_dead_letter(
    settings: Settings, publish: Any, answering_proxy: Any, tmp_path: Path
) -> None:
    producer = AckProducer(settings.kafka, "test")
    producer.send_raw(PROMPTS, b"g0", b"not an event").result(10)
    producer.close()
    publish(request(settings, "g0"))
    async with working(settings, answering_proxy, play_once, tmp_path):
        await until(lambda: len(answering_proxy.finalized) == 2)
    from journal.reader import TopicReader
    from schemas.codec import decode_as
    from schemas.events import DeadLetter

    reader = TopicReader(settings.kafka, [DEAD_LETTERS])
    (record,) = reader.read_to_end()
    reader.close()
    assert decode_as(record.value, DeadLetter).raw == b"not an event"
    assert committed(settings) == 2
