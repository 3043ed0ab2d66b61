"""Assembly of groups out of one partition of `rollout.segments.v1`: (state, event) -> (state, effects). Pure.

Invariants:
* an attempt gives at most one terminal effect, and afterwards its events change nothing (they are counted);
* `low_water` never passes the first record of a group that is open, nor anything that is not confirmed: reading again
  from there gives the same groups;
* the effects are a function of the partition's records in log order and of the closed attempts; time comes in by `tick`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas import events as ev
from schemas.errors import SchemaError
from schemas.settings import Settings
from streams.assembly_closed import Attempt, ClosedAttempts
from streams.assembly_facts import LONGEST_REASON, facts_of
from streams.assembly_lineages import TokenSequence, sequences_of
from streams.assembly_trajectory import Trajectory, impossible


class AssemblyRules(NamedTuple):
    """The settings that decide."""

    run_id: str
    group_size: int
    timeout_us: int
    min_live: int

    @classmethod
    def of(cls, settings: Settings) -> AssemblyRules:
        """From the run's settings tree."""
        group = settings.group
        return cls(
            settings.run.run_id, group.size, int(group.timeout_s * 1_000_000), group.min_live_trajectories
        )


class Completed(NamedTuple):
    """All of an attempt is there. `completion` makes the event once the rows are stored."""

    run_id: str
    attempt: Attempt
    policy_id: str
    occurred_at: int
    trajectories: tuple[ev.TrajectoryFacts, ...]
    sequences: list[TokenSequence]


class Failed(NamedTuple):
    """An attempt cannot complete."""

    attempt: Attempt
    event: ev.GroupFailed


class Rejected(NamedTuple):
    """A record that cannot be true: dead letter."""

    reason: str


Effect = Completed | Failed | Rejected


@dataclass(slots=True)
class OpenGroup:
    """One attempt on its way. `first_offset`: of its first record; `first_at`: when that event occurred. `settled`: trajectories
    that are, so that the last one of a large group does not have to look at all others."""

    first_offset: int
    first_at: int
    policy_id: str
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    samples: dict[int, str] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Assembly:
    """State of one partition. `unconfirmed`: what was caused by records from this offset on, and is not acknowledged."""

    rules: AssemblyRules
    closed: ClosedAttempts
    next_offset: int | None = None
    newest_at: int = 0
    groups: dict[Attempt, OpenGroup] = field(default_factory=dict)
    unconfirmed: dict[Hashable, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    closings_seen: int = 0


def apply(state: Assembly, offset: int, event: ev.Event) -> list[Effect]:
    """The record at `offset`. A record below `next_offset` was handled already."""
    if state.next_offset is not None and offset < state.next_offset:
        return []
    state.next_offset = offset + 1
    state.newest_at = max(state.newest_at, event.occurred_at)
    if event.run_id != state.rules.run_id:
        return _count(state, "other_run")
    if event.kind != "train":
        return _count(state, "other_kind")
    if not isinstance(event, ev.SessionEvent | ev.RewardAssigned):
        return [Rejected("unexpected_event")]
    if event.group_id is None or event.attempt is None:
        return [Rejected("no_group")]
    if is_closed(state.closed, event):
        return _count(state, "closed_attempt")
    attempt = Attempt(event.group_id, event.attempt)
    reason = impossible(event, state.rules.group_size)
    return [Rejected(reason)] if reason else _assemble(state, offset, attempt, event)


def is_closed(closed: ClosedAttempts, event: ev.SessionEvent | ev.RewardAssigned) -> bool:
    """Whether the event's attempt is, so that the event changes nothing."""
    return (
        event.group_id is not None
        and event.attempt is not None
        and Attempt(event.group_id, event.attempt) in closed
    )


def skip(state: Assembly, offset: int) -> None:
    """The record at `offset` could not be decoded; the caller has seen to it."""
    state.next_offset = max(offset + 1, state.next_offset or 0)


def tick(state: Assembly, now_us: int) -> list[Effect]:
    """Groups whose time is over fail. `now_us`: the clock once the partition is read to its end, else at most `newest_at`.

    An event from the future, of a writer whose clock is wrong, would never be too old: its group's time begins now.
    """
    for group in state.groups.values():
        group.first_at = min(group.first_at, now_us)
    late = [a for a, group in state.groups.items() if group.first_at + state.rules.timeout_us <= now_us]
    return [_fail(state, attempt, "timeout", None) for attempt in late]


def drop_closed(state: Assembly) -> None:
    """Groups that others have closed meanwhile (a verdict, another worker's result) are open no longer."""
    state.closings_seen, news = state.closed.since(state.closings_seen)
    touched = None if news is None else {attempt.group_id for attempt in news}
    gone = [a for a in state.groups if (touched is None or a.group_id in touched) and a in state.closed]
    for late in gone:
        del state.groups[late]
        state.counts["closed_by_others"] += 1


def hold(state: Assembly, token: Hashable, offset: int) -> None:
    """Keep the low-water mark at or below `offset` until `confirm(token)`."""
    state.unconfirmed[token] = min(offset, state.unconfirmed.get(token, offset))


def confirm(state: Assembly, token: Hashable) -> None:
    """What `token` stands for is in the log."""
    state.unconfirmed.pop(token, None)


def low_water(state: Assembly) -> int | None:
    """The offset to start from after a crash; None while nothing was read."""
    if state.next_offset is None:
        return None
    held = (group.first_offset for group in state.groups.values())
    return min((state.next_offset, *held, *state.unconfirmed.values()))


def completion(done: Completed, payload: ev.PayloadRef) -> ev.GroupCompleted:
    """The event of a complete group; the same whoever assembles it."""
    return ev.identified(
        ev.GroupCompleted(
            run_id=done.run_id,
            policy_id=done.policy_id,
            occurred_at=done.occurred_at,
            group_id=done.attempt.group_id,
            attempt=done.attempt.attempt,
            payload=payload,
            sequences=len(done.sequences),
            trainable_tokens=sum(int(row.loss_mask.sum()) for row in done.sequences),
            trajectories=done.trajectories,
        )
    )


def _assemble(
    state: Assembly, offset: int, attempt: Attempt, event: ev.SessionEvent | ev.RewardAssigned
) -> list[Effect]:
    group = state.groups.get(attempt)
    if group is not None and (reason := _contradiction(group, event)):
        return [Rejected(reason)]
    if group is None:
        group = state.groups[attempt] = OpenGroup(offset, event.occurred_at, event.policy_id)
    trajectory = group.trajectories.get(event.parent_traj_id)
    if trajectory is None:
        trajectory = group.trajectories[event.parent_traj_id] = Trajectory(event.parent_traj_id)
    if isinstance(event, ev.RewardAssigned):
        outcome = trajectory.take_reward(event)
    else:
        trajectory.sample_index = event.sample_index
        assert event.sample_index is not None  # `impossible` saw to it
        group.samples[event.sample_index] = event.parent_traj_id
        outcome = trajectory.take(event)
    state.counts[outcome] += 1
    return _close_if_done(state, attempt, group, trajectory) if outcome == "applied" else []


def _contradiction(group: OpenGroup, event: ev.SessionEvent | ev.RewardAssigned) -> str | None:
    """A sample has one trajectory, and a trajectory one sample."""
    if isinstance(event, ev.RewardAssigned) or event.sample_index is None:
        return None
    if group.samples.get(event.sample_index, event.parent_traj_id) != event.parent_traj_id:
        return "sample_has_another_trajectory"
    known = group.trajectories.get(event.parent_traj_id)
    if known is not None and known.sample_index not in (None, event.sample_index):
        return "trajectory_has_another_sample"
    return None


def _close_if_done(state: Assembly, attempt: Attempt, group: OpenGroup, changed: Trajectory) -> list[Effect]:
    size, min_live = state.rules.group_size, state.rules.min_live
    if changed.failed:
        failed = sum(t.failed for t in group.trajectories.values())
        if min_live == 0 or size - failed < min_live:
            assert changed.end is not None
            return [_fail(state, attempt, "trajectory_failed", changed.end.reason)]
    if not changed.settled:
        group.settled.discard(changed.parent_traj_id)  # a restart voids what was there
        return []
    group.settled.add(changed.parent_traj_id)
    if len(group.settled) < size:
        return []
    trajectories = [group.trajectories[group.samples[index]] for index in range(size)]
    try:
        built = [sequences_of(trajectory) for trajectory in trajectories]
    except SchemaError as wrong:
        return [_fail(state, attempt, "trajectory_failed", wrong.message)]
    rows = [row for _, sequences in built for row in sequences]
    if not rows:
        return [_fail(state, attempt, "trajectory_failed", "no trainable tokens")]
    _close(state, attempt)
    return [
        Completed(
            state.rules.run_id, attempt, group.policy_id, max(t.newest_at for t in trajectories),
            tuple(facts for facts, _ in built), rows,
        )
    ]  # fmt: skip


def _fail(state: Assembly, attempt: Attempt, reason: str, detail: str | None) -> Failed:
    group = state.groups[attempt]
    known = sorted((t.sample_index, t) for t in group.trajectories.values() if t.sample_index is not None)
    at = group.first_at + state.rules.timeout_us if reason == "timeout" else _newest(group)
    _close(state, attempt)
    event = ev.GroupFailed(
        run_id=state.rules.run_id,
        policy_id=group.policy_id,
        occurred_at=at,
        group_id=attempt.group_id,
        attempt=attempt.attempt,
        reason=reason,
        detail=None if detail is None else detail[:LONGEST_REASON],
        trajectories=tuple(facts_of(trajectory, 0) for _, trajectory in known),
    )
    return Failed(attempt, ev.identified(event))


def _newest(group: OpenGroup) -> int:
    return max(trajectory.newest_at for trajectory in group.trajectories.values())


def _close(state: Assembly, attempt: Attempt) -> None:
    """From here on the group holds the mark as something to be confirmed."""
    hold(state, attempt, state.groups.pop(attempt).first_offset)
    state.closed.add(attempt)


def _count(state: Assembly, name: str) -> list[Effect]:
    state.counts[name] += 1
    return []
