"""Events of `control.v1`: the one ordered log that verdicts and batches are a function of."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from schemas.events.base import Event, PayloadRef
from schemas.events.rollouts import TrajectoryStatus


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
