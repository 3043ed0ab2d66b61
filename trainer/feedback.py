"""What the trainer found in each sequence, as `SequenceFeedback` events, and the lag of a token.

lag = ordinal of the version trained on minus ordinal of the version that sampled the token. A token of a
version that was never published has no lag; in the event's int32 column it stands as NO_LAG, so that `lag >=
0` leaves it out. A negative lag is possible after a rollback only: the token is from weights that were given
up later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.events import SequenceFeedback, TrainBatch, identified
from schemas.tokens import ID_TYPE, LOGPROB_TYPE
from trainer.backends.contract import TokenFacts
from trainer.batches import StepData
from trainer.packing import PackedBatch

NO_LAG = np.iinfo(np.int32).min


@dataclass(frozen=True, slots=True)
class StepIdentity:
    """The step that feedback is about. `version` was trained on.

    Its rank among the published is `ordinal`.
    """

    batch: TrainBatch
    version: str
    ordinal: int
    occurred_at: int


def lags_of(versions: NDArray[np.int32], ordinal: int) -> NDArray[np.int32]:
    """Lag per token [N], NO_LAG where the version was never published."""
    return np.where(versions >= 0, ordinal - versions, NO_LAG).astype(np.int32)


def sequence_feedback(
    identity: StepIdentity, data: StepData, micro_batches: Sequence[PackedBatch], facts: Sequence[TokenFacts]
) -> Iterator[SequenceFeedback]:
    """One event per sequence, in the order of packing."""
    for packed, fact in zip(micro_batches, facts, strict=True):
        lags = lags_of(packed.versions, identity.ordinal)
        bounds = zip(packed.boundaries[:-1], packed.boundaries[1:], strict=True)
        for index, (low, high) in zip(packed.indices, bounds, strict=True):
            active = low + np.flatnonzero(packed.mask[low:high])
            yield _event(identity, data, index, packed, fact, lags, active)


def _event(
    identity: StepIdentity,
    data: StepData,
    index: int,
    packed: PackedBatch,
    fact: TokenFacts,
    lags: NDArray[np.int32],
    active: NDArray[np.int64],
) -> SequenceFeedback:
    origin, batch = data.origins[index], identity.batch
    trainer, rollout = fact.logprobs[active], packed.rollout_logprobs[active]
    ratio = np.exp(np.minimum(trainer.astype(np.float64) - rollout.astype(np.float64), 20.0))
    return identified(
        SequenceFeedback(
            run_id=batch.run_id,
            policy_id=batch.policy_id,
            occurred_at=identity.occurred_at,
            batch_id=batch.batch_id,
            step=batch.step,
            group_id=origin.group_id,
            attempt=origin.attempt,
            parent_traj_id=origin.parent_traj_id,
            sample_index=origin.sample_index,
            lineage_id=origin.lineage_id,
            version=identity.version,
            reward=origin.reward,
            advantage=data.sequences[index].advantage,
            trainer_logprobs=trainer.astype(LOGPROB_TYPE).tobytes(),
            rollout_logprobs=rollout.astype(LOGPROB_TYPE).tobytes(),
            lag=lags[active].astype(ID_TYPE).tobytes(),
            ratio_mean=float(ratio.mean()) if len(ratio) else 1.0,
            clip_fraction=float(fact.clipped[active].mean()) if len(active) else 0.0,
        )
    )
