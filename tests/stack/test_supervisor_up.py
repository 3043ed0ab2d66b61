"""Bringing a run up on a real broker: its settings are published once, and what is killed comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.topic_admin import create_topics, wait_for_broker
from schemas import events as ev
from schemas.codec import decode
from schemas.errors import ConfigError
from schemas.settings import Settings, load
from schemas.topics import CONTROL
from stack.plan import ARCHIVER, BROKER
from stack.up import Fates, configure_run, running

BASE: dict[str, Any] = {"run_id": "r", "occurred_at": 1}


def admitted(group: str, attempt: int = 0) -> ev.Event:
    return ev.GroupAdmitted(
        **BASE,
        group_id=group,
        attempt=attempt,
        group_size=2,
        prompt_index=0,
        dataset_epoch=0,
        prompt_digest="d",
    )


def verdict(group: str, outcome: Any) -> ev.Event:
    return ev.Verdict(**BASE, cause_offset=0, index=0, group_id=group, attempt=0, outcome=outcome, reason="r")


def test_a_run_is_settled_when_every_group_has_a_terminal_verdict_and_the_batches_ended() -> None:
    fates = Fates("r")
    end = ev.EndOfBatches(**BASE, cause_offset=0, index=0, steps=1, reason="run_ended")
    for event, undecided, settled in [
        (verdict("a", "kept"), set(), False),  # topics are read in any order
        (admitted("a"), set(), False),
        (admitted("b"), {"b"}, False),
        (verdict("b", "retry"), {"b"}, False),
        (end, {"b"}, False),
        (verdict("b", "dropped"), set(), True),
    ]:
        fates.fold(event)
        assert (fates.undecided, fates.settled) == (undecided, settled)


@pytest.fixture
def settings(kafka: str, tmp_path: Path) -> Settings:
    prefix = f"u{uuid.uuid4().hex[:8]}"
    made = load(
        sets=(f"kafka.bootstrap_servers={kafka}", f"kafka.topic_prefix={prefix}", f"run.directory={tmp_path}")
    )
    create_topics(made.kafka)
    return made


def control(settings: Settings) -> list[ev.Event]:
    reader = TopicReader(settings.kafka, [CONTROL])
    events = [decode(record.value) for record in reader.read_to_end()]
    reader.close()
    return events


@pytest.mark.broker
def test_the_settings_are_published_once(settings: Settings) -> None:
    said: list[str] = []
    configure_run(settings, settings, said.append)
    configure_run(settings, settings, said.append)
    (event,) = control(settings)
    assert isinstance(event, ev.RunConfigured)
    assert Settings.from_json(event.settings) == settings
    assert said == []


@pytest.mark.broker
def test_a_run_that_goes_on_keeps_the_settings_it_began_with(settings: Settings) -> None:
    said: list[str] = []
    configure_run(settings, settings, said.append)
    changed = load(
        sets=("window.keep_versions=9", "group.size=4", "group.timeout_s=7", "batch.size=2", "feeder.eta=1"),
        base=settings.model_dump(),
    )
    begun = configure_run(changed, changed, said.append)
    assert len(control(settings)) == 1
    assert (begun.window, begun.batch, begun.group.size) == (
        settings.window,
        settings.batch,
        settings.group.size,
    )
    assert (begun.group.timeout_s, begun.feeder.eta) == (7, 1)
    assert said == ["the run goes on as it began: window.keep_versions = 2, group.size = 8, batch.size = 8"]


@pytest.mark.broker
def test_settings_that_do_not_go_with_those_a_run_began_with_are_refused(settings: Settings) -> None:
    """A feeder with fewer places than the controller's batches have groups would wait for ever."""
    configure_run(settings, settings)
    few = load(sets=("batch.size=2", "feeder.max_outstanding_groups=4"), base=settings.model_dump())
    with pytest.raises(ConfigError, match="no batch could ever be filled"):
        configure_run(few, few)


@pytest.mark.broker
def test_a_configuration_that_the_controller_cannot_read_is_none(settings: Settings) -> None:
    producer = AckProducer(settings.kafka, "test")
    unreadable = ev.RunConfigured(
        run_id="run", occurred_at=1, settings="{}", settings_digest="x", software="0"
    )
    producer.publish(ev.identified(unreadable))
    producer.close()
    configure_run(settings, settings)
    assert [
        Settings.from_json(e.settings) for e in control(settings)[1:] if isinstance(e, ev.RunConfigured)
    ] == [settings]


@pytest.mark.broker
def test_an_ended_run_does_not_begin_again(settings: Settings) -> None:
    configure_run(settings, settings)
    producer = AckProducer(settings.kafka, "test")
    producer.publish(ev.identified(ev.RunEnded(run_id=settings.run.run_id, occurred_at=1, reason="trained")))
    producer.close()
    with pytest.raises(ConfigError, match="has ended"):
        configure_run(settings, settings)


@pytest.mark.broker
async def test_killed_processes_come_back_at_their_address(tmp_path: Path) -> None:
    settings = load(sets=(f"run.directory={tmp_path}",))
    said: list[str] = []
    async with running(settings, said.append, roles=frozenset({BROKER, ARCHIVER})) as stack:
        supervisor, servers = stack.supervisor, stack.settings.kafka.bootstrap_servers
        first = {name: supervisor.pid(name) for name in (BROKER, ARCHIVER)}
        for pid in first.values():
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        await until(lambda: all(supervisor.pid(name) not in (None, first[name]) for name in first))
        await asyncio.to_thread(wait_for_broker, stack.settings.kafka, 60.0)
        await asyncio.to_thread(create_topics, stack.settings.kafka)  # all are there, and answer
        assert stack.settings.kafka.bootstrap_servers == servers
        assert any(line.startswith("broker was ended by SIGKILL; it starts again") for line in said)
    assert supervisor.pid(BROKER) is None


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 — polls processes
            await asyncio.sleep(0.05)
