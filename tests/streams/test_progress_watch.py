"""A run that stands still says what it waits for, from the trainer back to the engines, and may end the attempt."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from control_log import RUN, completed, published, requested, step_completed
from control_processes import Child, Surroundings
from test_feeder_admission import activated, admitted, state_of, verdict
from test_start_watch import claimed

from schemas import events as ev
from schemas.codec import encode
from schemas.completed_brief import decode_briefly
from schemas.events import EndFacts, Event, identified
from schemas.ids import group_id, parent_traj_id
from streams.admission_bounds import Limits
from streams.assembly import OpenGroup
from streams.assembly_closed import Attempt
from streams.progress_watch import ProgressWatch, what_is_missing
from streams.segment_look import put_together

SECOND = 1_000_000
GROUP = group_id(RUN, 0, 0)
WAITS = f"group {GROUP} attempt 0 waits for"
LIMITS = Limits(8, 2, group_size=2)
SESSIONS = [parent_traj_id(RUN, GROUP, 0, sample) for sample in range(2)]


class Log:
    """Session events of one attempt."""

    def __init__(self, *events: Event) -> None:
        self._events = events

    def started(self, since: Mapping[Attempt, int]) -> set[Attempt]:
        raise AssertionError

    def assembled(self, attempt: Attempt, since_us: int) -> OpenGroup | None:
        return put_together(self._events)


def claim(sample: int) -> Event:
    return _session(ev.SessionClaimed, sample, claimant="c")


def ended(sample: int, segments: int = 0, *, pending: bool = False) -> Event:
    facts = EndFacts(segments, "completed", "done", None if pending else 1.0, pending)
    return _session(ev.TrajectoryEnded, sample, end=facts)


def reward(sample: int) -> Event:
    return identified(
        ev.RewardAssigned(
            run_id=RUN, occurred_at=6 * SECOND, parent_traj_id=SESSIONS[sample], group_id=GROUP, attempt=0,
            sample_index=sample, reward=1.0, source="judge",
        )
    )  # fmt: skip


def _session(event_type: type[Event], sample: int, **fields: object) -> Event:
    return identified(
        event_type(
            run_id=RUN, occurred_at=5 * SECOND, session_id=SESSIONS[sample], epoch=1, parent_traj_id=SESSIONS[sample],
            group_id=GROUP, attempt=0, sample_index=sample, **fields,
        )
    )  # fmt: skip


STARTED = [published("v0"), activated(), requested(1)]
BATCH = [admitted(0), admitted(1), *[completed(group_id(RUN, 0, i), ["v0", "v0"]) for i in range(2)]]
KEPT = [verdict(0, "kept", step=1), verdict(1, "kept", step=1)]


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ([], "no engine has taken a policy version yet"),
        (STARTED, "no group is running, and none is admitted"),
        ([*STARTED, *BATCH], "2 complete groups wait, and the controller makes no batch"),
        ([*STARTED, *BATCH, *KEPT], "the trainer has the batch of step 1 and has not completed it"),
        ([*STARTED, *BATCH, *KEPT, step_completed(1)], "the trainer has not asked for the batch of step 2"),
        ([*STARTED, admitted(0), verdict(0, "retry")], "1 groups wait to be admitted again"),
    ],
)
def test_who_has_to_act_next_is_named(log: list[Event], sentence: str) -> None:
    assert what_is_missing(state_of(log), LIMITS, Log(), RUN, 0).sentence == sentence


@pytest.mark.parametrize(
    ("events", "sentence", "sample"),
    [
        ([], f"group {GROUP} attempt 0 was requested 9 s ago and no session of it was opened", None),
        (
            [claim(0)],
            f"{WAITS} sample 0 at proxy session {SESSIONS[0]}: 0 segments, the newest event 4 s ago, no end",
            0,
        ),
        (
            [claim(0), ended(0)],
            f"{WAITS} sample 1, for which proxy session {SESSIONS[1]} was never opened",
            1,
        ),
        (
            [claim(0), ended(0), claim(1), ended(1, 3)],
            f"{WAITS} sample 1 at proxy session {SESSIONS[1]}: it ended, and 3 of 3 segments are missing",
            1,
        ),
        (
            [claim(0), ended(0, pending=True)],
            f"{WAITS} sample 0 at proxy session {SESSIONS[0]}: it ended, and its reward is missing",
            0,
        ),
        (
            [claim(0), ended(0, pending=True), reward(0), claim(1), ended(1)],
            f"group {GROUP} attempt 0 is all there, and the assembler does not complete it",
            None,
        ),
    ],
)  # fmt: skip
def test_the_sentence_names_group_attempt_sample_and_session(
    events: list[Event], sentence: str, sample: int | None
) -> None:
    state = state_of([*STARTED, admitted(0)])
    missing = what_is_missing(state, LIMITS, Log(*events), RUN, 9 * SECOND)
    assert missing.sentence == sentence
    assert (missing.attempt, missing.sample_index) == (Attempt(GROUP, 0), sample)


def watch(*, end_group: bool, patience_s: float = 60) -> ProgressWatch:
    return ProgressWatch(RUN, LIMITS, patience_s, Log(claim(0)), 0, end_group=end_group)


def test_the_alarm_comes_after_the_time_and_again_after_each_such_time() -> None:
    dog, state = watch(end_group=False), state_of([*STARTED, admitted(0)])
    dog.told(completed("x", ["v0"]), 10 * SECOND)
    dog.told(admitted(3), 50 * SECOND)
    times = [second for second in range(0, 220, 2) if dog.look_at(state, second * SECOND) is not None]
    assert times == [70, 130, 190]
    assert dog.alarms == 3
    assert dog.idle_s(220 * SECOND) == 210


def test_a_rollout_that_takes_longer_than_the_watchdogs_time_moves_as_long_as_its_events_come() -> None:
    """Its newest event occurred at 5 s; neither an alarm nor the end of the attempt before that is old enough."""
    dog = watch(end_group=True, patience_s=3)
    state = state_of([*STARTED, admitted(0)])
    said = {second: dog.look_at(state, second * SECOND) for second in range(10)}
    assert [second for second, what in said.items() if what is not None] == [8]
    assert dog.idle_s(9 * SECOND) == 4


def test_a_complete_group_that_is_read_briefly_is_progress() -> None:
    dog = ProgressWatch(RUN, LIMITS, 30, Log(), 0, end_group=False)
    dog.told(decode_briefly(encode(completed("x", ["v0"]))), 10 * SECOND)
    assert dog.idle_s(50 * SECOND) == 40


def test_an_alarm_has_its_facts_and_by_setting_ends_the_attempt() -> None:
    state = state_of([*STARTED, admitted(0)])
    said = watch(end_group=False).look_at(state, 66 * SECOND)
    assert said is not None
    alarm, failure = said
    assert failure is None
    assert alarm.name == "no_progress"
    assert alarm.message.startswith(f"nothing has moved for 61 s: group {GROUP} attempt 0 waits for sample 0")
    assert json.loads(alarm.detail or "") == {
        "waits_for": "trajectory", "group_id": GROUP, "attempt": 0, "sample_index": 0, "session_id": SESSIONS[0],
        "idle_s": 61.0,
    }  # fmt: skip
    said = watch(end_group=True).look_at(state, 66 * SECOND)
    assert said is not None
    failure = said[1]
    assert failure is not None
    assert (failure.group_id, failure.attempt, failure.reason) == (GROUP, 0, "no_progress")


@pytest.mark.parametrize("patience_s", [0, 1])
def test_a_run_that_ended_or_a_watchdog_that_is_off_says_nothing(patience_s: float) -> None:
    log: list[Event] = [*STARTED, admitted(0)]
    if patience_s:
        log.append(identified(ev.RunEnded(run_id=RUN, occurred_at=1, reason="done")))
    assert watch(end_group=True, patience_s=patience_s).look_at(state_of(log), 10**12) is None


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


@pytest.mark.broker
def test_f13_a_rollout_that_never_ends_is_named_and_its_attempt_is_tried_again(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    around = Surroundings(
        kafka, tmp_path, uuid.uuid4().hex[:8], prompts=1, batch__size=1, group__size=2, watchdog__no_progress_s=1.5,
        watchdog__end_group=True,
    )  # fmt: skip

    def hangs(request: ev.GroupRequested) -> bool:
        if request.attempt == 0:
            around.producer.publish(claimed(around.run_id, request.group_id, 0, 0))
        return request.attempt == 0

    around.ignores = hangs
    around.begin()
    children += [Child("streams.feeder", around.file), Child("streams.controller_app", around.file)]
    around.run_until(lambda: bool(around.all(ev.EndOfBatches)))
    alarms = [alarm for alarm in around.all(ev.Alarm) if "sample 0 at proxy session" in alarm.message]
    session = parent_traj_id(around.run_id, f"{around.run_id}-e0-p000000", 0, 0)
    assert session in alarms[0].message
    assert [(f.attempt, f.reason) for f in around.all(ev.GroupFailed)] == [(0, "no_progress")]
    assert [group.attempt for group in around.all(ev.TrainBatch)[0].groups] == [1]
    around.close()
