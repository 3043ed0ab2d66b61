"""Events of `rollout.prompts.v1` and `rollout.segments.v1`: what shall be rolled out, and what the proxy saw of it."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from schemas.events.base import Event, PayloadRef
from schemas.versions import VersionSpan

TrajectoryStatus = Literal["completed", "truncated", "failed"]


class GroupRequested(Event, frozen=True, kw_only=True):
    """Somebody shall roll out one attempt of a group. `prompt` is the dataset's JSON text."""

    IDENTITY: ClassVar = ("group_id", "attempt")
    group_id: str
    attempt: int
    group_size: int
    prompt_index: int
    dataset_epoch: int
    prompt: str | None = None
    prompt_ref: PayloadRef | None = None


class SessionEvent(Event, frozen=True, kw_only=True):
    """Ids of an event that belongs to a session. `epoch` is the claim under which it was written."""

    session_id: str
    epoch: int
    parent_traj_id: str
    group_id: str | None = None
    attempt: int | None = None
    sample_index: int | None = None


class SessionClaimed(SessionEvent, frozen=True, kw_only=True):
    """A proxy replica owns the session from here on; events of older epochs that come later are void.

    `restart`: everything that went before is void, too (a new try of the same `parent_traj_id`).
    """

    IDENTITY: ClassVar = ("session_id", "epoch", "claimant")
    claimant: str
    restart: bool = False


class TrajectoryStarted(SessionEvent, frozen=True, kw_only=True):
    """The session was opened. `instance_id` is what the agent called its group, `attributes` free JSON text."""

    IDENTITY: ClassVar = ("parent_traj_id", "epoch")
    instance_id: str | None = None
    attributes: str | None = None


class EndFacts(msgspec.Struct, frozen=True, gc=False):
    """How a trajectory ended; complete when `segment_count` segments are there and the reward is known."""

    segment_count: int
    status: TrajectoryStatus
    reason: str
    reward: float | None = None
    reward_pending: bool = False
    components: dict[str, float] = {}
    detail: str | None = None


class TokenSegment(SessionEvent, frozen=True, kw_only=True):
    """What one agent call appended to one lineage, over all its engine calls.

    The lineage's tokens before this segment are those of its parent: the segment `parent_segment_index` (None: empty),
    cut at `branch_point` tokens when that is not None. Then come `context_ids` and `output_ids`. `spans` partition the
    output. `tokens_ref` replaces the inline arrays of a large segment (codec `segment-columns`).
    `end` and `started` are set where the fact is known together with the segment: then one event is enough.
    """

    IDENTITY: ClassVar = ("parent_traj_id", "segment_index", "epoch")
    segment_index: int
    lineage_id: str
    parent_segment_index: int | None = None
    branch_point: int | None = None
    lineage_reason: str | None = None
    turn_id: str | None = None
    api: str
    role: str = "assistant"
    context_ids: bytes
    output_ids: bytes
    output_logprobs: bytes
    tokens_ref: PayloadRef | None = None
    spans: tuple[VersionSpan, ...]
    version_at_dispatch: str
    engine_id: str
    finish_reason: str
    request: str | None = None
    request_ref: PayloadRef | None = None
    request_digest: str
    sampling: str
    response: str | None = None
    prompt_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    tito_mismatch_tokens: int = 0
    received_at: int
    first_token_at: int
    done_at: int
    experts: PayloadRef | None = None
    started: bool = False
    end: EndFacts | None = None


class TrajectoryEnded(SessionEvent, frozen=True, kw_only=True):
    """The end of a trajectory as an event of its own."""

    IDENTITY: ClassVar = ("parent_traj_id", "epoch")
    end: EndFacts


class RewardAssigned(Event, frozen=True, kw_only=True):
    """The reward of a trajectory that ended with `reward_pending`; the first one wins.

    `epoch`: a claim of the session that the reward is about; one that is older than the session's restart is void.
    """

    IDENTITY: ClassVar = ("parent_traj_id", "source", "epoch")
    parent_traj_id: str
    group_id: str | None = None
    attempt: int | None = None
    sample_index: int | None = None
    session_id: str | None = None
    epoch: int | None = None
    reward: float
    components: dict[str, float] = msgspec.field(default_factory=dict)
    source: str
