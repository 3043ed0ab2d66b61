"""Emission after a crash between any two effects, dead letters, and a log of effects that contradicts the fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from control_log import RUN, admitted, completed, configured, dataset_ended, logs, requested, run_ended
from hypothesis import given, settings
from hypothesis import strategies as st

from journal.producer import AckProducer
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import topics
from schemas.codec import decode, encode
from schemas.errors import InvariantBroken
from schemas.events import Effect, Event
from schemas.settings import KafkaSettings
from streams.control_output import Written, read_buried, read_written
from streams.control_worker import ControllerWorker

OUTPUTS = (topics.VERDICTS, topics.BATCHES)


@dataclass
class Raw:
    offset: int
    value: bytes | None
    key: bytes | None = RUN.encode()
    timestamp: int = 7
    headers: Sequence[tuple[str, bytes]] = field(default_factory=list)


def records(log: Sequence[Event]) -> list[Raw]:
    return [Raw(offset, encode(event), event.run_id.encode()) for offset, event in enumerate(log)]


def worker(there: Sequence[Effect] = (), buried: set[int] | None = None) -> ControllerWorker:
    written = {topic.name: Written(topic) for topic in OUTPUTS}
    for effect in there:
        written[topics.TOPIC_OF[type(effect)].name].add(effect)
    return ControllerWorker(RUN, written, buried or set())


def effects_of(log: Sequence[Event], there: Sequence[Effect] = ()) -> list[Effect]:
    into = worker(there)
    return [e for record in records(log) for e in into.take(record) if isinstance(e, Effect)]


@settings(max_examples=100, deadline=None)
@given(logs(), st.data())
def test_a_crash_between_any_two_effects_writes_each_once(log: list[Event], data: st.DataObject) -> None:
    """Any of the last cause's effects may have arrived: the topics are independent, and a send may fail alone."""
    whole = effects_of(log)
    cut = data.draw(st.integers(0, len(whole)))
    there = whole[:cut]
    if there:
        last = [effect for effect in whole if effect.cause_offset == there[-1].cause_offset]
        arrived = data.draw(st.sets(st.sampled_from(range(len(last)))))
        earlier = [effect for effect in there if effect.cause_offset < last[0].cause_offset]
        there = [*earlier, *[last[i] for i in sorted(arrived)]]
    rest = effects_of(log, there)
    assert sorted([*there, *rest], key=lambda e: (e.cause_offset, e.index)) == whole


def test_a_record_that_cannot_be_read_is_buried_once_and_the_fold_goes_on() -> None:
    bad = Raw(1, b"junk", headers=[("h", b"1")])
    log = [records([configured(batch__size=1)])[0], bad, Raw(2, encode(requested(1)))]
    into = worker()
    out = [event for record in log for event in into.take(record)]
    assert len(out) == 1
    letter = out[0]
    assert isinstance(letter, ev.DeadLetter)
    assert (letter.topic, letter.partition, letter.offset, letter.raw) == ("control.v1", 0, 1, b"junk")
    assert (letter.key, letter.headers) == (b"r", {"h": b"1"})
    assert letter.reason.startswith("unknown_event")
    assert into.state.request is not None
    again = worker(buried={1})
    assert [event for record in log for event in again.take(record)] == []


def test_another_runs_bad_record_is_not_ours_to_bury() -> None:
    assert worker().take(Raw(0, b"junk", key=b"other")) == []


@pytest.mark.parametrize(
    ("says", "instead"),
    [
        ('"keep_versions":2', '"keep_versions":-1'), ('"max_retries":2', '"max_retries":-1'), ('"share":0.2', '"share":0'),
        ('"short_last":true,"size":8', '"short_last":true,"size":0'), ('{"', '["'),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fold_is_buried_and_the_next_one_counts(
    says: str, instead: str
) -> None:
    into = worker()
    assert says in configured().settings
    wrong = msgspec.structs.replace(configured(), settings=configured().settings.replace(says, instead))
    first, second = records([wrong, configured()])
    assert [type(event) for event in into.take(first)] == [ev.DeadLetter]
    assert into.take(second) == []
    assert into.state.settings is not None


def test_effects_that_contradict_the_fold_stop_the_controller() -> None:
    log = [configured(batch__size=1), requested(1), admitted("a"), completed("a", ["v1"])]
    batch = effects_of(log)[0]
    with pytest.raises(InvariantBroken) as caught:
        effects_of(log, [msgspec.structs.replace(batch, event_id="0" * 32)])
    assert caught.value.detail["topic"] == "train.batches.v1"


@pytest.mark.broker
def test_what_is_written_is_found_from_the_end_however_many_effects_the_last_cause_has(kafka: str) -> None:
    prefix = "worker-ends"
    kafka_settings = KafkaSettings(bootstrap_servers=kafka, topic_prefix=prefix, publish_timeout_s=10)
    create_topics(kafka_settings)
    for topic in OUTPUTS:
        assert read_written(kafka_settings, topic, RUN).last_cause == -1
    names = [f"g{n:04d}" for n in range(700)]
    log = [configured(), *[admitted(name) for name in names], run_ended(), dataset_ended()]
    whole = effects_of(log)
    assert len(whole) == 701
    producer = AckProducer(kafka_settings, "test")
    foreign = msgspec.structs.replace(whole[0], run_id="other", cause_offset=10**6)
    for event in [*whole[:650], foreign]:
        producer.send(event)
    producer.send_raw(topics.VERDICTS, b"k", b"junk")
    producer.send(
        ev.DeadLetter(
            run_id=RUN, occurred_at=1, topic="control.v1", partition=0, offset=4, key=None, reason="", raw=b""
        )
    )
    producer.send(
        ev.DeadLetter(
            run_id=RUN,
            occurred_at=1,
            topic="rollout.segments.v1",
            partition=0,
            offset=5,
            key=None,
            reason="",
            raw=b"",
        )
    )
    producer.close()
    written = {topic.name: read_written(kafka_settings, topic, RUN) for topic in OUTPUTS}
    verdicts = written["rollout.verdicts.v1"]
    assert (verdicts.last_cause, len(verdicts.ids)) == (701, 650)
    into = ControllerWorker(RUN, written, read_buried(kafka_settings, RUN))
    rest = [event for record in records(log) for event in into.take(record)]
    assert [encode(event) for event in rest] == [encode(effect) for effect in whole[650:]]
    assert read_buried(kafka_settings, RUN) == {4}
    assert decode(encode(rest[-1])) == rest[-1]
