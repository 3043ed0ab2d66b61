"""All events of design §3 as frozen classes. `event_id` is a hash of the fields named in `IDENTITY`, so that the same fact
has the same id whoever writes it and however often; `identified` fills it in.

Times are integers: UTC microseconds. Token ids are little-endian int32 in `bytes`, log-probs little-endian float32.
Ids that do not apply are None (`attempt` and `sample_index` too): free and eval traffic belongs to no group.
"""

from __future__ import annotations

from schemas.events.base import (
    Event,
    Kind,
    PayloadRef,
    identified,
)
from schemas.events.control import (
    Alarm,
    BatchRequested,
    DatasetEnded,
    GroupAdmitted,
    GroupCompleted,
    GroupFailed,
    LagDrift,
    PolicyActivated,
    PolicyPublished,
    RolledBack,
    RunConfigured,
    RunEnded,
    StepCompleted,
    TrajectoryFacts,
)
from schemas.events.outcomes import (
    BatchGroup,
    DeadLetter,
    Effect,
    EndOfBatches,
    Outcome,
    SequenceFeedback,
    TrainBatch,
    Verdict,
)
from schemas.events.rollouts import (
    EndFacts,
    GroupRequested,
    RewardAssigned,
    SessionClaimed,
    SessionEvent,
    TokenSegment,
    TrajectoryEnded,
    TrajectoryStarted,
    TrajectoryStatus,
)

EVENT_TYPES: tuple[type[Event], ...] = (
    GroupRequested, SessionClaimed, TrajectoryStarted, TokenSegment, TrajectoryEnded, RewardAssigned, RunConfigured, RunEnded,
    GroupAdmitted, DatasetEnded, GroupCompleted, GroupFailed, PolicyPublished, PolicyActivated, BatchRequested, StepCompleted,
    RolledBack, Alarm, Verdict, TrainBatch, EndOfBatches, SequenceFeedback, DeadLetter,
)  # fmt: skip

__all__ = [
    "EVENT_TYPES",
    "Alarm",
    "BatchGroup",
    "BatchRequested",
    "DatasetEnded",
    "DeadLetter",
    "Effect",
    "EndFacts",
    "EndOfBatches",
    "Event",
    "GroupAdmitted",
    "GroupCompleted",
    "GroupFailed",
    "GroupRequested",
    "Kind",
    "LagDrift",
    "Outcome",
    "PayloadRef",
    "PolicyActivated",
    "PolicyPublished",
    "RewardAssigned",
    "RolledBack",
    "RunConfigured",
    "RunEnded",
    "SequenceFeedback",
    "SessionClaimed",
    "SessionEvent",
    "StepCompleted",
    "TokenSegment",
    "TrainBatch",
    "TrajectoryEnded",
    "TrajectoryFacts",
    "TrajectoryStarted",
    "TrajectoryStatus",
    "Verdict",
    "identified",
]
