"""The real controller on a real broker, killed between every pair of effects: what is in the topics at the end are the bytes of
a run that was never killed, each once."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from control_log import (
    RUN,
    admitted,
    completed,
    configured,
    dataset_ended,
    failed,
    published,
    requested,
    run_fold,
    step_completed,
)
from control_processes import Child

from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import topics
from schemas.codec import encode
from schemas.events import Effect, Event
from schemas.settings import Settings

pytestmark = [pytest.mark.broker]
ROOT = Path(__file__).parents[2]

KILLED = """
import asyncio, os, signal, sys, threading
from concurrent.futures import Future
from pathlib import Path
import mode.loop
mode.loop.use("uvloop")
from journal.log_setup import configure_logging
from journal.producer import AckProducer
from schemas.settings import Settings
from streams.controller_app import Controller

class Dying(AckProducer):
    '''Ends the process when the effects that it may write are acknowledged; withheld ones never leave.'''
    def __init__(self, settings, may_write, withheld):
        super().__init__(settings.kafka, "dying")
        self.left, self.withheld, self.held_back = may_write, withheld, False

    def send(self, event, **options):
        if type(event).__name__ == self.withheld:
            if not self.held_back:
                self.held_back = True
                threading.Timer(1.0, self.die).start()  # what was sent beside it has arrived by then
            return Future()
        if self.left == 0:
            self.die()
        self.left -= 1
        return super().send(event, **options)

    def die(self):
        self.flush()
        os.kill(os.getpid(), signal.SIGKILL)

settings = Settings.from_json(Path(sys.argv[1]).read_text())
configure_logging("controller")

async def run():
    return await Controller(settings, Dying(settings, int(sys.argv[2]), sys.argv[3])).run()

asyncio.run(run())
"""
LOG: list[Event] = [
    configured(batch__size=2, window__keep_versions=1, group__max_retries=1, group__size=2),
    published("v0"),
    *[admitted(name) for name in "abcdefg"],
    completed("a", ["v0", "v0"]),
    requested(1),
    failed("b"),  # retry
    admitted("b", 1),
    completed("b", ["v0", "v0"], attempt=1),  # the first batch: a and b
    completed("c", ["v0", "v0"]),
    step_completed(1),
    published("v1"),  # c is stale
    completed("d", ["v1", "v1"]),
    completed("e", ["v1", "v1"]),
    requested(2),  # the second batch: d and e
    failed("f"),
    admitted("f", 1),
    failed("f", 1),  # given up
    step_completed(2),
    requested(3),
    dataset_ended(),
    completed("g", ["v1", "v1"]),  # the last, short batch, and the end mark
]


class Scene:
    """A broker's topics with the whole log in them, and settings for controllers."""

    def __init__(self, kafka: str, tmp_path: Path) -> None:
        tree = {
            "run": {"run_id": RUN, "directory": str(tmp_path)},
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"kills-{uuid.uuid4().hex[:8]}",
                "partitions": 1,
            },
        }
        self.settings = Settings.model_validate(tree)
        self.file = tmp_path / "settings.json"
        self.file.write_text(self.settings.to_json())
        create_topics(self.settings.kafka)
        producer = AckProducer(self.settings.kafka, "test")
        for event in LOG:
            producer.publish(event)
        producer.close()

    def written(self, topic: topics.Topic) -> list[bytes]:
        reader = TopicReader(self.settings.kafka, [topic])
        try:
            return [record.value for record in reader.read_to_end()]
        finally:
            reader.close()

    def effects(self) -> int:
        return sum(len(self.written(topic)) for topic in (topics.VERDICTS, topics.BATCHES))

    def run_killed(self, may_write: int, withheld: str = "-") -> None:
        """A controller until it has written so much."""
        process = subprocess.run(
            [sys.executable, "-c", KILLED, self.file, str(may_write), withheld],
            cwd=ROOT,
            check=False,
            timeout=120,
            start_new_session=True,
        )
        assert process.returncode == -signal.SIGKILL

    def finish(self, expected: Sequence[Effect], child: list[Child]) -> None:
        """A controller that is not killed; what is there behind it is what the fold gives, each effect once."""
        child.append(Child("streams.controller_app", self.file))
        wait_until(lambda: self.effects() >= len(expected))
        assert child[-1].stop() == 0
        for topic in (topics.VERDICTS, topics.BATCHES):
            assert self.written(topic) == [
                encode(effect) for effect in expected if topics.TOPIC_OF[type(effect)] is topic
            ]


@pytest.fixture
def child() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for one in started:
        one.end()


def wait_until(reached: object) -> None:
    import time

    assert callable(reached)
    deadline = time.monotonic() + 90
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_scene_has_everything_that_a_controller_can_cause() -> None:
    effects = run_fold(*LOG)
    told = {(e.outcome, e.reason) for e in effects if isinstance(e, ev.Verdict)}
    assert told == {
        ("kept", "trained"),
        ("dropped", "stale"),
        ("dropped", "retry_exhausted"),
        ("retry", "timeout"),
    }
    assert [e.short for e in effects if isinstance(e, ev.TrainBatch)] == [False, False, True]
    assert isinstance(effects[-1], ev.EndOfBatches)


def test_killed_after_every_effect_the_topics_hold_the_bytes_of_a_run_without_kills(
    kafka: str, tmp_path: Path, child: list[Child]
) -> None:
    """Each controller writes one effect more than the one before it."""
    scene, expected = Scene(kafka, tmp_path), run_fold(*LOG)
    for number in range(1, len(expected)):
        scene.run_killed(1)
        assert scene.effects() == number
    scene.finish(expected, child)


@pytest.mark.parametrize("withheld", ["TrainBatch", "Verdict", "EndOfBatches"])
def test_killed_when_one_topic_has_the_effects_of_a_cause_and_the_other_has_not(
    kafka: str, tmp_path: Path, child: list[Child], withheld: str
) -> None:
    scene, expected = Scene(kafka, tmp_path), run_fold(*LOG)
    scene.run_killed(100, withheld)
    scene.finish(expected, child)
