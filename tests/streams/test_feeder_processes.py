"""Feeder and controller on a real broker, killed and started again: every prompt once, every effect once, none lost."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_processes import Child, Surroundings

from journal.reader import TopicReader
from schemas import events as ev
from schemas import topics
from schemas.codec import decode, encode
from schemas.errors import SchemaError
from schemas.events import Effect
from schemas.topics import Topic
from streams.control_fold import fold
from streams.control_state import ControlState

pytestmark = pytest.mark.broker


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


def written(around: Surroundings, topic: Topic) -> list[Effect]:
    """Effects in a topic, repetitions (same place, same bytes) dropped as every consumer does."""
    found: dict[str, Effect] = {}
    reader = TopicReader(around.settings.kafka, [topic])
    for record in reader.read_to_end():
        event = decode(record.value)
        assert isinstance(event, Effect)
        assert encode(found.setdefault(event.event_id, event)) == encode(event)
    reader.close()
    return list(found.values())


def refolded(around: Surroundings) -> tuple[list[Effect], int]:
    """The control log folded here, and the most groups that were open right behind an admission."""
    state, effects, most = ControlState(around.run_id), [], 0
    reader = TopicReader(around.settings.kafka, [topics.CONTROL])
    for record in reader.read_to_end():
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        effects += fold(state, record.offset, event)
        if isinstance(event, ev.GroupAdmitted):
            most = max(most, state.open_groups)
    reader.close()
    return effects, most


def test_killed_feeder_and_controller_lose_nothing_and_repeat_nothing(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    around = Surroundings(
        kafka, tmp_path, uuid.uuid4().hex[:8], prompts=14, batch__size=3, group__size=2, window__keep_versions=2,
        feeder__max_outstanding_groups=5, feeder__epochs=2, group__max_retries=1,
    )  # fmt: skip
    around.fails = lambda request: (
        (request.prompt_index % 5 == 0 and request.attempt == 0) or request.prompt_index == 10
    )
    around.begin()
    around.producer.send_raw(topics.CONTROL, around.run_id.encode(), b"no event at all").result()
    feeder = Child("streams.feeder", around.file)
    controller = Child("streams.controller_app", around.file)
    children += [feeder, controller]

    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 2)
    controller.kill()
    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 4)
    feeder.kill()
    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 6)
    feeder.kill()
    controller.kill()
    around.run_until(lambda: bool(around.all(ev.EndOfBatches)))

    assert feeder.process.wait(30) == 0, feeder.log
    assert controller.stop() == 0, controller.log
    effects, most_open = refolded(around)
    for topic in (topics.VERDICTS, topics.BATCHES):
        expected = [encode(effect) for effect in effects if topics.TOPIC_OF[type(effect)] is topic]
        assert [encode(effect) for effect in written(around, topic)] == expected
    assert most_open <= 5
    around.run_until(lambda: len(around.all(ev.Verdict)) >= sum(isinstance(e, ev.Verdict) for e in effects))

    admissions = Counter((e.group_id, e.attempt) for e in around.all(ev.GroupAdmitted))
    assert set(admissions.values()) == {1}
    first = [(e.dataset_epoch, e.prompt_index) for e in around.all(ev.GroupAdmitted) if e.attempt == 0]
    assert sorted(first) == [(epoch, index) for epoch in range(2) for index in range(14)]
    assert {(e.group_id, e.attempt) for e in around.all(ev.GroupRequested)} == set(admissions)
    verdicts = [e for e in effects if isinstance(e, ev.Verdict)]
    terminal = Counter(v.group_id for v in verdicts if v.outcome != "retry")
    assert set(terminal) == {e.group_id for e in around.all(ev.GroupAdmitted)}
    assert set(terminal.values()) == {1}
    assert {v.reason for v in verdicts if v.outcome == "retry"} == {"trajectory_failed"}
    assert len(around.all(ev.DatasetEnded)) == 1
    assert len({letter.event_id for letter in around.all(ev.DeadLetter)}) == 1
    around.close()


def test_a_feeder_that_starts_again_requests_what_was_admitted_and_never_requested(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    """Killed between the two acknowledgements: the log shows an admission without a request."""
    import json

    from streams.feeder_dataset import prompt_digest, prompt_text

    around = Surroundings(kafka, tmp_path, uuid.uuid4().hex[:8], prompts=3, batch__size=1, group__size=2)
    around.begin()
    group = f"{around.run_id}-e0-p000001"
    around.publish(
        ev.GroupAdmitted, group_id=group, attempt=0, group_size=2, prompt_index=1, dataset_epoch=0,
        prompt_digest=prompt_digest(prompt_text({"n": 1})),
    )  # fmt: skip
    feeder = Child("streams.feeder", around.file)
    children.append(feeder)
    around.run_until(lambda: len(around.all(ev.GroupRequested)) >= 3)
    requests = {request.group_id: json.loads(request.prompt) for request in around.all(ev.GroupRequested)}
    assert requests[group] == {"n": 1}
    assert len(requests) == 3
    around.publish(ev.RunEnded, reason="done")
    assert feeder.process.wait(30) == 0, feeder.log
    around.close()


def test_another_dataset_under_the_same_run_is_refused(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    around = Surroundings(kafka, tmp_path, uuid.uuid4().hex[:8], prompts=3, batch__size=1)
    around.begin()
    around.publish(
        ev.GroupAdmitted,
        group_id="g",
        attempt=0,
        group_size=2,
        prompt_index=1,
        dataset_epoch=0,
        prompt_digest="other",
    )
    feeder = Child("streams.feeder", around.file)
    children.append(feeder)
    assert feeder.process.wait(30) == 2  # another try would not help
    assert "config_error" in feeder.log
    around.close()


def test_a_second_controller_waits_and_takes_over(kafka: str, tmp_path: Path, children: list[Child]) -> None:
    around = Surroundings(
        kafka,
        tmp_path,
        uuid.uuid4().hex[:8],
        prompts=8,
        batch__size=1,
        group__size=2,
        feeder__max_outstanding_groups=2,
    )
    around.begin()
    feeder = Child("streams.feeder", around.file)
    first = Child("streams.controller_app", around.file)
    children += [feeder, first]
    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 1)
    second = Child("streams.controller_app", around.file)
    children.append(second)
    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 3)
    first.end()
    around.run_until(lambda: bool(around.all(ev.EndOfBatches)))
    assert second.stop() == 0, second.log
    effects, _ = refolded(around)
    for topic in (topics.VERDICTS, topics.BATCHES):
        expected = [encode(effect) for effect in effects if topics.TOPIC_OF[type(effect)] is topic]
        assert [encode(effect) for effect in written(around, topic)] == expected
    around.close()


def test_a_killed_broker_comes_back_and_the_run_goes_on(tmp_path: Path, children: list[Child]) -> None:
    from stack.broker.embedded import EmbeddedKafka

    broker = EmbeddedKafka(tmp_path / "broker")
    broker.start()
    try:
        around = Surroundings(
            broker.bootstrap_servers, tmp_path, uuid.uuid4().hex[:8], prompts=12, batch__size=2, group__size=2,
            feeder__max_outstanding_groups=3,
        )  # fmt: skip
        around.begin()
        children += [Child("streams.feeder", around.file), Child("streams.controller_app", around.file)]
        around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 2)
        broker.kill()
        broker.start()
        around.run_until(lambda: bool(around.all(ev.EndOfBatches)) or restarted(children))
        effects, _ = refolded(around)
        for topic in (topics.VERDICTS, topics.BATCHES):
            expected = [encode(effect) for effect in effects if topics.TOPIC_OF[type(effect)] is topic]
            assert [encode(effect) for effect in written(around, topic)] == expected
        assert len({e.group_id for e in around.all(ev.GroupAdmitted)}) == 12
        around.close()
    finally:
        for child in children:
            child.end()
        broker.stop()


def restarted(children: list[Child]) -> bool:
    """What the supervisor does: who ended with an error starts again. Never a reason to stop waiting."""
    for child in children:
        if child.process.poll() not in (None, 0):
            child.kill()
    return False
