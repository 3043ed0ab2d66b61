"""All events of design §3 as frozen classes. `event_id` is a hash of the fields named in `IDENTITY`, so that the same fact
has the same id whoever writes it and however often; `identified` fills it in.

Times are integers: UTC microseconds. Token ids are little-endian int32 in `bytes`, log-probs little-endian float32.
Ids that do not apply are None (`attempt` and `sample_index` too): free and eval traffic belongs to no group.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeVar

import msgspec

from schemas.ids import stable_id
from schemas.versions import VersionSpan

Kind = Literal["train", "eval", "free"]
TrajectoryStatus = Literal["completed", "truncated", "failed"]
Outcome = Literal["kept", "dropped", "retry"]


class PayloadRef(msgspec.Struct, frozen=True, gc=False):
    """Bytes in the payload store. `uri` is relative to the store's root: `<run>/<group>/<attempt>/<sha256>`."""

    uri: str
    sha256: str
    size: int
    codec: str


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What every event carries."""

    IDENTITY: ClassVar[tuple[str, ...]] = ()
    event_id: str = ""
    run_id: str
    kind: Kind = "train"
    policy_id: str = "main"
    occurred_at: int


E = TypeVar("E", bound=Event)


def identified(event: E) -> E:
    """The same event with its deterministic `event_id`."""
    parts = [getattr(event, name) for name in event.IDENTITY]
    return msgspec.structs.replace(event, event_id=stable_id(type(event).__name__, event.run_id, *parts))


# --- rollout.prompts.v1 ------------------------------------------------------------------------------------------------


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


# --- rollout.segments.v1 -----------------------------------------------------------------------------------------------


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
    components: dict[str, float] = {}
    source: str


# --- control.v1 --------------------------------------------------------------------------------------------------------


class RunConfigured(Event, frozen=True, kw_only=True):
    """The settings of the run as JSON text: the fold's only source of settings."""

    IDENTITY: ClassVar = ("settings_digest",)
    settings: str
    settings_digest: str
    software: str


class RunEnded(Event, frozen=True, kw_only=True):
    """The run is over: every open group becomes `dropped(run_ended)`."""

    IDENTITY: ClassVar = ()
    reason: str


class GroupAdmitted(Event, frozen=True, kw_only=True):
    """The feeder lets an attempt of a group in; it holds a place until its verdict."""

    IDENTITY: ClassVar = ("group_id", "attempt")
    group_id: str
    attempt: int
    group_size: int
    prompt_index: int
    dataset_epoch: int
    prompt_digest: str


class DatasetEnded(Event, frozen=True, kw_only=True):
    """No new prompts will be admitted (retries still are)."""

    IDENTITY: ClassVar = ()
    groups: int


class TrajectoryFacts(msgspec.Struct, frozen=True, gc=False):
    """One trajectory as the control plane sees it. `version` is that of its last trainable token ("" if none is real).

    `tokens_digest`: sha256 over the output ids of its live segments in `segment_index` order.
    """

    parent_traj_id: str
    sample_index: int
    version: str
    versions: tuple[str, ...]
    reward: float | None
    status: TrajectoryStatus
    reason: str
    segments: int
    sequences: int
    output_tokens: int
    context_tokens: int
    preemptions: int
    abandoned_segments: int
    tokens_digest: str
    started_at: int
    ended_at: int


class GroupCompleted(Event, frozen=True, kw_only=True):
    """All trajectories of an attempt are complete; their sequences are in one Arrow file."""

    IDENTITY: ClassVar = ("group_id", "attempt")
    group_id: str
    attempt: int
    payload: PayloadRef
    sequences: int
    trainable_tokens: int
    trajectories: tuple[TrajectoryFacts, ...]


class GroupFailed(Event, frozen=True, kw_only=True):
    """An attempt cannot complete: `reason` is trajectory_failed, timeout, not_started, or no_progress."""

    IDENTITY: ClassVar = ("group_id", "attempt")
    group_id: str
    attempt: int
    reason: str
    detail: str | None = None
    trajectories: tuple[TrajectoryFacts, ...] = ()


class PolicyPublished(Event, frozen=True, kw_only=True):
    """New weights exist under a label. Its ordinal is its rank among these events in `control.v1`, never sent."""

    IDENTITY: ClassVar = ("policy_id", "version")
    version: str
    checkpoint_uri: str | None = None
    step: int | None = None
    branch: str = ""
    digest: str | None = None


class PolicyActivated(Event, frozen=True, kw_only=True):
    """An engine generates with this version from now on."""

    IDENTITY: ClassVar = ("policy_id", "version", "engine_id", "occurred_at")
    version: str
    engine_id: str
    preempted: int = 0
    pause_ms: float = 0.0


class BatchRequested(Event, frozen=True, kw_only=True):
    """The trainer asks for the batch of a step; one open request at most."""

    IDENTITY: ClassVar = ("step", "branch")
    step: int
    batch_id: str
    branch: str = ""


class LagDrift(msgspec.Struct, frozen=True, gc=False):
    """Drift of the tokens of one lag in one step: log-prob differences trainer minus rollout, in nats."""

    lag: int
    tokens: int
    mean: float
    mean_abs: float
    max_abs: float


class StepCompleted(Event, frozen=True, kw_only=True):
    """An optimizer step is durable (`checkpoint_step`: the newest step on disk). `digest`: sha256 of the weights."""

    IDENTITY: ClassVar = ("step", "branch")
    step: int
    branch: str = ""
    batch_id: str
    digest: str
    checkpoint_step: int
    metrics: dict[str, float]
    drift: tuple[LagDrift, ...] = ()


class RolledBack(Event, frozen=True, kw_only=True):
    """The trainer could not reproduce recorded steps: steps after `to_step` are trained again on `branch`."""

    IDENTITY: ClassVar = ("branch",)
    to_step: int
    branch: str
    reason: str


class Alarm(Event, frozen=True, kw_only=True):
    """Somebody must know. Folds ignore it."""

    IDENTITY: ClassVar = ("name", "message", "occurred_at")
    name: str
    message: str
    detail: str | None = None


# --- rollout.verdicts.v1, train.batches.v1 -----------------------------------------------------------------------------


class Effect(Event, frozen=True, kw_only=True):
    """An output of the controller: caused by the record at `cause_offset` of `control.v1`, the `index`-th of its effects."""

    cause_offset: int
    index: int


class Verdict(Effect, frozen=True, kw_only=True):
    """What became of an attempt. Terminal: kept, dropped. `gap_*` are version gaps when it was judged."""

    IDENTITY: ClassVar = ("group_id", "attempt")
    group_id: str
    attempt: int
    outcome: Outcome
    reason: str
    next_attempt: int | None = None
    batch_id: str | None = None
    current_index: int = -1
    cutoff_index: int = 0
    gap_min: int = 0
    gap_max: int = 0
    gap_mean: float = 0.0


class BatchGroup(msgspec.Struct, frozen=True, gc=False):
    """One group in a manifest."""

    group_id: str
    attempt: int
    payload: PayloadRef
    sequences: int
    trainable_tokens: int
    versions: tuple[str, ...]


class TrainBatch(Effect, frozen=True, kw_only=True):
    """The groups of one optimizer step. `current_version`: newest version when it was emitted ("" if none)."""

    IDENTITY: ClassVar = ("batch_id",)
    batch_id: str
    step: int
    branch: str = ""
    groups: tuple[BatchGroup, ...]
    current_version: str
    cutoff_version: str
    window: tuple[str, ...]
    short: bool = False


class EndOfBatches(Effect, frozen=True, kw_only=True):
    """No batch will follow."""

    IDENTITY: ClassVar = ()
    steps: int
    reason: str


# --- train.feedback.v1, dead_letters.v1 --------------------------------------------------------------------------------


class SequenceFeedback(Event, frozen=True, kw_only=True):
    """Trainer's facts of one sequence. Arrays are over its trainable tokens, in order: log-probs float32, lag int32.

    `version`: newest published version when the step began, the one that was trained on.
    """

    IDENTITY: ClassVar = ("batch_id", "parent_traj_id", "lineage_id")
    batch_id: str
    step: int
    group_id: str
    attempt: int
    parent_traj_id: str
    sample_index: int
    lineage_id: str
    version: str
    reward: float
    advantage: float
    trainer_logprobs: bytes
    rollout_logprobs: bytes
    lag: bytes
    ratio_mean: float
    clip_fraction: float


class DeadLetter(Event, frozen=True, kw_only=True):
    """A record that could not be used, kept as it was."""

    IDENTITY: ClassVar = ("topic", "partition", "offset")
    topic: str
    partition: int
    offset: int
    key: bytes | None
    headers: dict[str, bytes] = {}
    reason: str
    raw: bytes


EVENT_TYPES: tuple[type[Event], ...] = (
    GroupRequested, SessionClaimed, TrajectoryStarted, TokenSegment, TrajectoryEnded, RewardAssigned, RunConfigured, RunEnded,
    GroupAdmitted, DatasetEnded, GroupCompleted, GroupFailed, PolicyPublished, PolicyActivated, BatchRequested, StepCompleted,
    RolledBack, Alarm, Verdict, TrainBatch, EndOfBatches, SequenceFeedback, DeadLetter,
)  # fmt: skip
