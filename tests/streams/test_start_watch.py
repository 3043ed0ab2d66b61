"""Attempts that nobody started: judged once, by what the log shows, ended by the feeder."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from control_log import RUN, failed
from control_processes import Child, Surroundings
from test_feeder_admission import activated, admitted, state_of, verdict

from schemas import events as ev
from schemas.events import identified
from schemas.ids import group_id, parent_traj_id
from streams.assembly import OpenGroup
from streams.assembly_closed import Attempt
from streams.segment_look import SegmentLook
from streams.start_watch import StartWatch

MINUTE = 60_000_000


class Seen:
    """The log of sessions as a set."""

    def __init__(self, *started: Attempt) -> None:
        self.log = set(started)
        self.asked: list[set[Attempt]] = []

    def started(self, since: Mapping[Attempt, int]) -> set[Attempt]:
        self.asked.append(set(since))
        return self.log & since.keys()

    def assembled(self, attempt: Attempt, since_us: int) -> OpenGroup | None:
        raise AssertionError


def attempt(index: int, number: int = 0) -> Attempt:
    return Attempt(group_id(RUN, 0, index), number)


def test_what_nobody_started_fails_after_its_time_and_what_was_started_is_asked_about_once() -> None:
    look = Seen(attempt(1))
    watch = StartWatch(RUN, 60, look, begun_at=0)
    state = state_of([activated(), *map(admitted, range(3)), failed(group_id(RUN, 0, 2))])
    assert list(watch.failures(state, MINUTE)) == []
    assert look.asked == []
    (failure,) = watch.failures(state, MINUTE + 1)
    assert (failure.group_id, failure.attempt, failure.reason) == (*attempt(0), "not_started")
    state.fold(failure)
    assert list(watch.failures(state, 2 * MINUTE)) == []
    assert look.asked == [{attempt(0), attempt(1)}]


def test_the_next_attempt_has_its_own_time() -> None:
    watch = StartWatch(RUN, 60, Seen(attempt(0)), begun_at=0)
    state = state_of([activated(), admitted(0), verdict(0, "retry")])
    assert list(watch.failures(state, 5 * MINUTE)) == []
    state.fold(admitted(0, 1))
    assert [failure.attempt for failure in watch.failures(state, 5 * MINUTE)] == [1]


def test_a_feeder_that_starts_again_gives_open_attempts_their_whole_time() -> None:
    state = state_of([activated(), admitted(0)])
    watch = StartWatch(RUN, 60, Seen(), begun_at=10 * MINUTE)
    assert list(watch.failures(state, 11 * MINUTE - 1)) == []
    assert len(list(watch.failures(state, 11 * MINUTE))) == 1


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


def claimed(run_id: str, group: str, number: int, sample: int) -> ev.SessionClaimed:
    trajectory = parent_traj_id(run_id, group, number, sample)
    return identified(
        ev.SessionClaimed(
            run_id=run_id, occurred_at=time.time_ns() // 1000, session_id=trajectory, epoch=1, parent_traj_id=trajectory,
            group_id=group, attempt=number, sample_index=sample, claimant="c",
        )
    )  # fmt: skip


@pytest.mark.broker
def test_a_request_that_is_ignored_is_tried_again_and_one_that_was_started_is_left_alone(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    around = Surroundings(
        kafka, tmp_path, uuid.uuid4().hex[:8], prompts=3, batch__size=2, group__size=2, feeder__start_timeout_s=1.5,
        feeder__shuffle=False, feeder__max_outstanding_groups=3,
    )  # fmt: skip
    ignored, slow = (f"{around.run_id}-e0-p{index:06d}" for index in (1, 2))

    def ignores(request: ev.GroupRequested) -> bool:
        if request.group_id == slow:
            around.producer.publish(claimed(around.run_id, slow, request.attempt, 1))
        return request.group_id == slow or (request.group_id == ignored and request.attempt == 0)

    around.ignores = ignores
    around.begin()
    children += [Child("streams.feeder", around.file), Child("streams.controller_app", around.file)]
    around.run_until(lambda: bool(around.all(ev.TrainBatch)))
    failures = around.all(ev.GroupFailed)
    assert [(f.group_id, f.attempt, f.reason) for f in failures] == [(ignored, 0, "not_started")]
    assert {group.group_id for group in around.all(ev.TrainBatch)[0].groups} == {
        f"{around.run_id}-e0-p000000",
        ignored,
    }
    around.close()


@pytest.mark.broker
def test_a_look_finds_sessions_of_the_attempt_alone_and_puts_it_together(kafka: str, tmp_path: Path) -> None:
    around = Surroundings(kafka, tmp_path, uuid.uuid4().hex[:8], prompts=1, group__size=2)
    look, now = SegmentLook(around.settings), time.time_ns() // 1000
    for number, sample in ((0, 0), (1, 1)):
        around.producer.publish(claimed(around.run_id, "g", number, sample))
    around.producer.publish(claimed(around.run_id, "other", 2, 0))
    buried = claimed(around.run_id, "g", 2, 7)  # no such sample
    foreign = msgspec.structs.replace(claimed(around.run_id, "g", 2, 0), run_id="another")
    judged = msgspec.structs.replace(claimed(around.run_id, "g", 2, 0), kind="eval")
    for nothing in (
        buried,
        foreign,
        judged,
    ):  # an assembler opens no attempt for them, so that none would ever time out
        around.producer.publish(nothing)
    asked = {Attempt("g", number): now for number in range(3)} | {Attempt("h", 0): now}
    assert look.started(asked) == {Attempt("g", 0), Attempt("g", 1)}
    group = look.assembled(Attempt("g", 1), now)
    assert group is not None
    assert group.samples == {1: parent_traj_id(around.run_id, "g", 1, 1)}
    assert look.assembled(Attempt("g", 2), now) is None
    around.close()
