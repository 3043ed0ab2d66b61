"""The watchdog of a run: nothing has moved for `watchdog.no_progress_s`, so somebody must know what is missing.

It lives in the feeder, which knows from the log who has to act next. One sentence goes out as an `Alarm` (and again after each
such time); by setting the attempt that all wait for is ended as `GroupFailed(no_progress)`, and the rules of retries go on
from there. Which sample an attempt waits for is read from the segments topic when it is asked, never before.

The session of a group's trajectory has the trajectory's id, so the proxy's session can be named even if it was never opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from schemas import events as ev
from schemas.completed_brief import CompletedBrief
from schemas.events import identified
from schemas.ids import parent_traj_id
from streams.admission import AdmissionState
from streams.admission_bounds import Limits
from streams.assembly import OpenGroup
from streams.assembly_closed import Attempt
from streams.assembly_trajectory import Trajectory
from streams.segment_look import AttemptLook

ALARM = "no_progress"
_MOVES = (
    ev.GroupCompleted,
    CompletedBrief,
    ev.GroupFailed,
    ev.PolicyPublished,
    ev.PolicyActivated,
    ev.BatchRequested,
    ev.StepCompleted,
    ev.TrainBatch,
)


@dataclass(frozen=True, slots=True)
class Missing:
    """What the run waits for. `attempt`: of the group, if it is one; `moved_at`: when the newest event of that occurred."""

    sentence: str
    waits_for: str
    attempt: Attempt | None = None
    sample_index: int | None = None
    session_id: str | None = None
    moved_at: int = 0


class ProgressWatch:
    """`told`: whatever the feeder reads; `look_at`: now and then, what to publish. Times: UTC microseconds."""

    def __init__(
        self,
        run_id: str,
        limits: Limits,
        no_progress_s: float,
        look: AttemptLook,
        now_us: int,
        *,
        end_group: bool,
    ) -> None:
        self._run_id, self._limits, self._look, self._end_group = run_id, limits, look, end_group
        self._patience_us = int(no_progress_s * 1_000_000)
        self._moved_at = now_us
        self._said_at = now_us
        self.alarms = 0

    def told(self, event: ev.Event | CompletedBrief, now_us: int) -> None:
        """An event was read; some of them are progress."""
        if isinstance(event, _MOVES) and event.run_id == self._run_id:
            self._moved_at = now_us

    def idle_s(self, now_us: int) -> float:
        """Seconds since something moved."""
        return max(0, now_us - self._moved_at) / 1_000_000

    def look_at(self, state: AdmissionState, now_us: int) -> tuple[ev.Alarm, ev.GroupFailed | None] | None:
        """None: the run moves, if only by tokens of a rollout that takes long, or this was said a short time ago."""
        quiet_since = max(self._moved_at, self._said_at)
        if not self._patience_us or state.ended or now_us - quiet_since < self._patience_us:
            return None
        missing = what_is_missing(state, self._limits, self._look, self._run_id, now_us)
        self._moved_at = max(self._moved_at, min(missing.moved_at, now_us))
        if now_us - self._moved_at < self._patience_us:
            return None
        self._said_at = now_us
        self.alarms += 1
        return self._alarm(missing, now_us), self._failure(missing, now_us)

    def _alarm(self, missing: Missing, now_us: int) -> ev.Alarm:
        detail = {
            "waits_for": missing.waits_for,
            "group_id": missing.attempt.group_id if missing.attempt else None,
            "attempt": missing.attempt.attempt if missing.attempt else None,
            "sample_index": missing.sample_index,
            "session_id": missing.session_id,
            "idle_s": self.idle_s(now_us),
        }
        message = f"nothing has moved for {self.idle_s(now_us):.0f} s: {missing.sentence}"
        return identified(
            ev.Alarm(
                run_id=self._run_id, occurred_at=now_us, name=ALARM, message=message,
                detail=json.dumps(detail, sort_keys=True),
            )
        )  # fmt: skip

    def _failure(self, missing: Missing, now_us: int) -> ev.GroupFailed | None:
        if not self._end_group or missing.attempt is None:
            return None
        return identified(
            ev.GroupFailed(
                run_id=self._run_id, occurred_at=now_us, group_id=missing.attempt.group_id,
                attempt=missing.attempt.attempt, reason=ALARM, detail=missing.sentence,
            )
        )  # fmt: skip


def what_is_missing(
    state: AdmissionState, limits: Limits, look: AttemptLook, run_id: str, now_us: int
) -> Missing:
    """Who has to act next, from the consumer's end of the run to its beginning."""
    if not state.activated:
        return Missing("no engine has taken a policy version yet", "engine")
    step = len(state.emitted)
    if step > state.trained_steps:
        return Missing(
            f"the trainer has the batch of step {state.trained_steps + 1} and has not completed it", "trainer"
        )
    if state.open_request is None:
        return Missing(f"the trainer has not asked for the batch of step {step + 1}", "trainer")
    complete = [group for group in state.open_groups.values() if not group.running]
    if sum(map(limits.weight, complete)) >= limits.batch_size:
        return Missing(
            f"{len(complete)} complete groups wait, and the controller makes no batch", "controller"
        )
    if state.retries:
        return Missing(f"{len(state.retries)} groups wait to be admitted again", "feeder")
    running = {
        Attempt(name, group.attempt): group.admitted_at
        for name, group in state.open_groups.items()
        if group.running
    }
    if running:
        oldest = min(running, key=lambda attempt: (running[attempt], attempt))
        return _missing_of(oldest, running[oldest], limits, look, run_id, now_us)
    rest = "and the dataset has ended" if state.dataset_ended else "and none is admitted"
    return Missing(f"no group is running, {rest}", "feeder")


def _missing_of(
    attempt: Attempt, admitted_at: int, limits: Limits, look: AttemptLook, run_id: str, now_us: int
) -> Missing:
    name = f"group {attempt.group_id} attempt {attempt.attempt}"
    group = look.assembled(attempt, admitted_at)
    if group is None:
        ago = _ago(admitted_at, now_us)
        return Missing(f"{name} was requested {ago} and no session of it was opened", "rollout", attempt)
    moved_at = max(trajectory.newest_at for trajectory in group.trajectories.values())
    for index in range(limits.group_size):
        session = parent_traj_id(run_id, attempt.group_id, attempt.attempt, index)
        found = _of_sample(group, index)
        if found is None:
            what = f"{name} waits for sample {index}, for which proxy session {session} was never opened"
            return Missing(what, "rollout", attempt, index, session, moved_at)
        if not found.settled:
            what = f"{name} waits for sample {index} at proxy session {session}: {_lacks(found, now_us)}"
            return Missing(what, "trajectory", attempt, index, session, moved_at)
    what = f"{name} is all there, and the assembler does not complete it"
    return Missing(what, "assembler", attempt, moved_at=moved_at)


def _of_sample(group: OpenGroup, index: int) -> Trajectory | None:
    trajectory = group.samples.get(index)
    return group.trajectories.get(trajectory) if trajectory is not None else None


def _lacks(trajectory: Trajectory, now_us: int) -> str:
    there = len(trajectory.segments)
    if trajectory.end is None:
        return f"{there} segments, the newest event {_ago(trajectory.newest_at, now_us)}, no end"
    if there < trajectory.end.segment_count:
        return f"it ended, and {trajectory.end.segment_count - there} of {trajectory.end.segment_count} segments are missing"
    return "it ended, and its reward is missing"


def _ago(at: int, now_us: int) -> str:
    return f"{max(0, now_us - at) / 1_000_000:.0f} s ago"
