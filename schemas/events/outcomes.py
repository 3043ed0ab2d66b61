"""Events of `rollout.verdicts.v1`, `train.batches.v1`, `train.feedback.v1` and `dead_letters.v1`: what became of it all."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from schemas.events.base import Event, PayloadRef

Outcome = Literal["kept", "dropped", "retry"]


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
    headers: dict[str, bytes] = msgspec.field(default_factory=dict)
    reason: str
    raw: bytes
