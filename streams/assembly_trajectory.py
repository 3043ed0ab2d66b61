"""One trajectory while its events come in: what is known, whether it is complete. Pure.

Events of a session are taken in any order and any number of times, but for the claims, whose place in the log decides
(`schemas.claims`). The first end and the first reward win. Columns stay the events' own bytes until the group is done.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from schemas.claims import NO_EPOCH, standing
from schemas.events import (
    EndFacts,
    RewardAssigned,
    SessionClaimed,
    SessionEvent,
    TokenSegment,
    TrajectoryEnded,
    TrajectoryStarted,
)
from schemas.versions import covers

Outcome = Literal["applied", "duplicate", "void", "after_end"]


class Trajectory:
    """State of one `parent_traj_id`. `sample_index` is None until an event of its session was read."""

    __slots__ = (
        "_assigned",
        "_restarted_at",
        "_void_rewards",
        "end",
        "ended_at",
        "epoch",
        "parent_traj_id",
        "reward",
        "sample_index",
        "segments",
        "started_at",
        "touched_at",
    )

    def __init__(self, parent_traj_id: str) -> None:
        self.parent_traj_id = parent_traj_id
        self.sample_index: int | None = None
        self.epoch = NO_EPOCH
        self._restarted_at = NO_EPOCH  # epoch of the last restart
        self._void_rewards: tuple[RewardAssigned, ...] = ()  # of rewards that name no epoch
        self._forget()

    def _forget(self) -> None:
        """The state of a trajectory of which nothing counts yet."""
        self.segments: dict[int, TokenSegment] = {}
        self.end: EndFacts | None = None
        self.ended_at = 0
        self.reward: float | None = None
        self._assigned: RewardAssigned | None = None
        self.started_at: int | None = None
        self.touched_at = 0  # newest occurred_at of what counts, segments aside

    @property
    def failed(self) -> bool:
        """Whether it ended without a result that can be trained on."""
        return self.end is not None and self.end.status == "failed"

    @property
    def settled(self) -> bool:
        """Ended, every segment there, and (unless it failed) its reward known: nobody can train on one without."""
        end = self.end
        if end is None or any(index not in self.segments for index in range(end.segment_count)):
            return False
        return self.failed or self.reward is not None

    @property
    def newest_at(self) -> int:
        """Newest `occurred_at` of the events that count, however they were ordered."""
        return max((self.touched_at, *(segment.occurred_at for segment in self.segments.values())))

    def take(self, event: SessionEvent) -> Outcome:
        """An event of the session."""
        place = standing(event, self.epoch)
        if place == "void":
            return "void"
        self.epoch = event.epoch
        if place == "restart":
            self._restarted_at = event.epoch
            if self._assigned is not None and self._assigned.epoch is None:
                self._void_rewards += (self._assigned,)
            self._forget()
        outcome = self._take_valid(event)
        if outcome == "applied" and not isinstance(event, TokenSegment):
            self.touched_at = max(self.touched_at, event.occurred_at)
        return outcome

    def take_reward(self, event: RewardAssigned) -> Outcome:
        """A reward of its own; the first known one wins. One of a voided try may come late, or be read again."""
        if event.epoch is None:
            if event in self._void_rewards:
                return "void"
        elif event.epoch < self._restarted_at:
            return "void"
        if self.reward is not None:
            return "duplicate"
        self.reward, self._assigned = event.reward, event
        self.touched_at = max(self.touched_at, event.occurred_at)
        return "applied"

    def _take_valid(self, event: SessionEvent) -> Outcome:
        match event:
            case TokenSegment():
                return self._take_segment(event)
            case TrajectoryEnded():
                return self._take_end(event.end, event.occurred_at)
            case TrajectoryStarted():
                self._start(event.occurred_at)
        return "applied"

    def _take_segment(self, event: TokenSegment) -> Outcome:
        if event.segment_index in self.segments:
            return "duplicate"
        if self.end is not None and event.segment_index >= self.end.segment_count:
            return "after_end"  # it was in flight when the trajectory was ended
        self.segments[event.segment_index] = _without_texts(event)
        self._start(event.received_at)
        if event.end is not None:
            self._take_end(event.end, event.done_at)
        return "applied"

    def _take_end(self, end: EndFacts, at: int) -> Outcome:
        if self.end is not None:
            return "duplicate"
        self.end, self.ended_at = end, at
        for index in [i for i in self.segments if i >= end.segment_count]:
            del self.segments[index]
        if self.reward is None:
            self.reward = end.reward
        return "applied"

    def _start(self, at: int) -> None:
        self.started_at = at if self.started_at is None else min(self.started_at, at)


def _without_texts(event: TokenSegment) -> TokenSegment:
    """Assembly needs the columns alone; an open group would hold every request and response otherwise."""
    if event.request is None and event.response is None:
        return event
    return msgspec.structs.replace(event, request=None, response=None)


def impossible(event: SessionEvent | RewardAssigned, group_size: int) -> str | None:
    """Why this event cannot be true of a group's trajectory whatever else the log says; None if it can."""
    if isinstance(event, RewardAssigned):
        return None if math.isfinite(event.reward) else "reward_not_finite"
    if event.sample_index is None or not 0 <= event.sample_index < group_size:
        return "sample_out_of_range"
    if isinstance(event, SessionClaimed | TrajectoryStarted):
        return None
    end = event.end if isinstance(event, TokenSegment | TrajectoryEnded) else None
    if end is not None and end.reward is not None and not math.isfinite(end.reward):
        return "reward_not_finite"
    if end is not None and end.segment_count < 0:
        return "negative_segment_count"
    return _impossible_segment(event) if isinstance(event, TokenSegment) else None


def _impossible_segment(event: TokenSegment) -> str | None:
    if len(event.context_ids) % 4 or len(event.output_ids) % 4:
        return "torn_token_ids"
    if len(event.output_logprobs) != len(event.output_ids):
        return "logprobs_do_not_fit_output"
    if not covers(event.spans, len(event.output_ids) // 4):
        return "spans_do_not_cover_output"
    if event.segment_index < 0:
        return "negative_segment_index"
    parent = event.parent_segment_index
    if parent is not None and not 0 <= parent < event.segment_index:
        return "parent_is_not_earlier"
    if event.branch_point is not None and (event.branch_point < 0 or parent is None):
        return "branch_without_parent"
    return None
