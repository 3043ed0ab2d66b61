"""The trainer on a real broker: its order of events, kill -9 anywhere, retraining, rollback, the stop signal.

The batches are there before the trainer starts: the controller's part is not under test. Nobody answers as proxy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import hand_made
import pytest
import tiny_policy

from journal.clock import system_clock
from journal.event_log import read_events
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.topic_admin import create_topics
from schemas.errors import ConfigError
from schemas.events import (
    BatchRequested,
    EndOfBatches,
    Event,
    PolicyPublished,
    RolledBack,
    SequenceFeedback,
    StepCompleted,
    identified,
)
from schemas.settings import Settings
from schemas.topics import CONTROL, FEEDBACK, Topic
from trainer.process import train

pytestmark = pytest.mark.broker
RUN, STEPS, DEADLINE_S = "run", 4, 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy.write_checkpoint(tmp_path_factory.mktemp("initial"))


@pytest.fixture
def settings(kafka: str, checkpoint: Path, tmp_path: Path) -> Settings:
    return new_run(kafka, checkpoint, tmp_path)


def new_run(
    kafka: str, checkpoint: Path, directory: Path, *, batches: int = STEPS, **trainer: object
) -> Settings:
    """A run of its own topics and directory with `batches` batches waiting."""
    settings = Settings.model_validate(
        {
            "run": {"run_id": RUN, "directory": str(directory)},
            "kafka": {"bootstrap_servers": kafka, "topic_prefix": f"trainer-{uuid.uuid4().hex[:8]}"},
            "engine": {"model": str(checkpoint)},
            "trainer": {"steps": STEPS, "loss": "sat", "learning_rate": 0.01, "entropy_bonus": 0.01}
            | trainer,
        }
    )
    create_topics(settings.kafka)
    store = PayloadStore(settings.payload_url)
    publish(settings, [hand_made.stored_batch(store, RUN, step) for step in range(1, batches + 1)])
    return settings


def publish(settings: Settings, events: Sequence[Event]) -> None:
    producer = AckProducer(settings.kafka, "test")
    for event in events:
        producer.send(event)
    producer.close()


def run_here(settings: Settings) -> None:
    train(settings, AckProducer(settings.kafka, "trainer"))


def start_process(settings: Settings, *arguments: str) -> subprocess.Popen[bytes]:
    path = settings.run_directory / "settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(settings.to_json())
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments[:1], str(path), *arguments[1:]]
    return subprocess.Popen(command, env=environment, cwd=root, start_new_session=True)


def run_killed(settings: Settings, when: str, event: type[Event], step: int) -> None:
    """Run in a process that is killed at the event."""
    script = str(Path(__file__).with_name("killable_trainer.py"))
    child = start_process(settings, script, when, event.__name__, str(step))
    assert child.wait(DEADLINE_S) == -signal.SIGKILL


def read_all(settings: Settings, topic: Topic) -> list[Event]:
    reader = TopicReader(settings.kafka, [topic])
    try:
        return [event for _, event in read_events(reader.read_to_end())]
    finally:
        reader.close()


def control(settings: Settings) -> list[Event]:
    return read_all(settings, CONTROL)


def digests(settings: Settings) -> dict[int, str]:
    """Of the completed steps; the first event of a step counts, all must agree."""
    found: dict[int, str] = {}
    for event in control(settings):
        if isinstance(event, StepCompleted):
            assert found.setdefault(event.step, event.digest) == event.digest
    return found


@pytest.fixture(scope="module")
def uninterrupted(kafka: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Digests of the same batches trained without an interruption."""
    settings = new_run(kafka, checkpoint, tmp_path_factory.mktemp("uninterrupted"))
    run_here(settings)
    return digests(settings)


def test_events_of_a_run_come_in_order(settings: Settings) -> None:
    run_here(settings)
    names = [type(event).__name__ for event in control(settings)]
    step = ["BatchRequested", "StepCompleted", "PolicyPublished"]
    assert names == ["PolicyPublished", *step * STEPS]
    versions = [event.version for event in control(settings) if isinstance(event, PolicyPublished)]
    assert versions == ["v000000", "v000001", "v000002", "v000003", "v000004"]
    completed = [event for event in control(settings) if isinstance(event, StepCompleted)]
    assert [event.checkpoint_step for event in completed] == [1, 2, 3, 4]
    assert [(row.lag, row.tokens > 0) for row in completed[2].drift] == [(2, True)]
    assert completed[0].metrics["reward_mean"] == 0.5
    feedback = [event for event in read_all(settings, FEEDBACK) if isinstance(event, SequenceFeedback)]
    assert Counter(event.step for event in feedback) == {1: 8, 2: 8, 3: 8, 4: 8}
    assert len({event.event_id for event in feedback}) == 32
    exports = sorted(path.name for path in (settings.run_directory / "policies").iterdir())
    assert exports == ["v000002", "v000003", "v000004"]
    assert len(list((settings.run_directory / "checkpoints").iterdir())) == 3


@pytest.mark.parametrize(
    ("when", "event", "step"),
    [
        pytest.param("before", StepCompleted, 2, id="between checkpoint and StepCompleted"),
        pytest.param("before", PolicyPublished, 2, id="between StepCompleted and PolicyPublished"),
        pytest.param("after", PolicyPublished, 0, id="behind the first publication"),
        pytest.param("after", BatchRequested, 3, id="behind a request"),
    ],
)
def test_killed_trainer_goes_on_as_if_nothing_had_happened(
    settings: Settings, uninterrupted: dict[int, str], when: str, event: type[Event], step: int
) -> None:
    """F17: between publishing weights and saying that the step is done; the log decides, and the step happened once."""
    run_killed(settings, when, event, step)
    run_here(settings)
    assert digests(settings) == uninterrupted
    ids = Counter(event.event_id for event in control(settings))
    assert set(ids.values()) == {1}
    assert len(ids) == 1 + 3 * STEPS


def test_steps_without_a_checkpoint_are_trained_again_with_equal_digests(
    kafka: str, checkpoint: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    settings = new_run(kafka, checkpoint, tmp_path, checkpoint_every=10)
    run_killed(settings, "after", StepCompleted, 3)
    assert not (settings.run_directory / "checkpoints").exists()
    run_here(settings)
    assert digests(settings) == uninterrupted
    assert not [event for event in control(settings) if isinstance(event, RolledBack)]


def test_step_that_cannot_be_reproduced_begins_a_branch(
    settings: Settings, uninterrupted: dict[int, str]
) -> None:
    past = history_with_a_step_nobody_can_train_again(settings, uninterrupted)
    run_here(settings)
    new = control(settings)[len(past) :]
    (rolled_back,) = [event for event in new if isinstance(event, RolledBack)]
    assert (rolled_back.to_step, rolled_back.branch) == (1, "b1")
    again = [event for event in new if isinstance(event, StepCompleted)]
    assert [(e.step, e.branch, e.digest) for e in again] == [(s, "b1", uninterrupted[s]) for s in (2, 3, 4)]
    versions = [event.version for event in new if isinstance(event, PolicyPublished)]
    assert versions == ["v000002-b1", "v000003-b1", "v000004-b1"]
    assert [event.step for event in new if isinstance(event, BatchRequested)] == [4]
    run_here(settings)  # a later start finds nothing to do
    assert len(control(settings)) == len(past) + len(new)


def test_kill_behind_the_rollback_does_not_roll_back_again(
    settings: Settings, uninterrupted: dict[int, str]
) -> None:
    past = history_with_a_step_nobody_can_train_again(settings, uninterrupted)
    run_killed(settings, "after", RolledBack, 1)
    run_here(settings)
    new = control(settings)[len(past) :]
    assert len([event for event in new if isinstance(event, RolledBack)]) == 1
    again = [event for event in new if isinstance(event, StepCompleted)]
    assert [(e.step, e.branch, e.digest) for e in again] == [(s, "b1", uninterrupted[s]) for s in (2, 3, 4)]


def history_with_a_step_nobody_can_train_again(
    settings: Settings, uninterrupted: dict[int, str]
) -> list[Event]:
    """The log has steps 1 to 3, the second with weights that its batch does not give."""
    past: list[Event] = [published(0, None)]
    for step, digest in ((1, uninterrupted[1]), (2, "0" * 64), (3, "1" * 64)):
        request = BatchRequested(run_id=RUN, occurred_at=1, step=step, batch_id=f"b{step}")
        past += [identified(request), completed(step, digest), published(step, digest)]
    publish(settings, past)
    return past


def published(step: int, digest: str | None) -> PolicyPublished:
    return identified(
        PolicyPublished(run_id=RUN, occurred_at=1, version=f"v{step:06d}", step=step, digest=digest)
    )


def completed(step: int, digest: str) -> StepCompleted:
    return identified(
        StepCompleted(
            run_id=RUN,
            occurred_at=1,
            step=step,
            batch_id=f"b{step}",
            digest=digest,
            checkpoint_step=0,
            metrics={},
        )
    )


def test_other_initial_weights_than_the_runs_are_refused(settings: Settings) -> None:
    publish(settings, [published(0, "f" * 64)])
    with pytest.raises(ConfigError, match=r"engine\.model"):
        run_here(settings)


def test_end_of_batches_ends_the_run(kafka: str, checkpoint: Path, tmp_path: Path) -> None:
    settings = new_run(kafka, checkpoint, tmp_path, batches=2)
    end = EndOfBatches(run_id=RUN, occurred_at=1, cause_offset=99, index=0, steps=2, reason="dataset_ended")
    publish(settings, [identified(end)])
    run_here(settings)
    assert sorted(digests(settings)) == [1, 2]


def test_stop_signal_ends_a_waiting_trainer_with_success(
    kafka: str, checkpoint: Path, tmp_path: Path
) -> None:
    settings = new_run(kafka, checkpoint, tmp_path, batches=0)
    script = "import sys; from trainer.process import main; from schemas.settings import Settings; "
    script += "sys.exit(main(Settings.from_json(open(sys.argv[1]).read())))"
    path = settings.run_directory / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(script)
    child = start_process(settings, str(path))
    deadline = system_clock() + int(DEADLINE_S * 1e6)
    while not any(isinstance(event, BatchRequested) for event in control(settings)):
        assert system_clock() < deadline
        assert child.poll() is None
        time.sleep(0.2)
    child.terminate()
    assert child.wait(30) == 0
