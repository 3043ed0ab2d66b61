"""One optimizer step: sequences to packed micro-batches, one update, and what is to be said about it.

The proximal log-probs are those of the weights before the update, which the update's own forward pass
computes: one update per batch makes them the same thing. Drift is taken from them, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schemas.events import LagDrift, SequenceFeedback, TrainBatch
from schemas.settings import TrainerSettings
from trainer.backends.contract import Backend, OptimizerSettings, StepResult
from trainer.batches import StepData
from trainer.feedback import NO_LAG, StepIdentity, lags_of, sequence_feedback
from trainer.losses.contract import Loss
from trainer.losses.drift import drift_by_lag
from trainer.losses.registry import build_loss
from trainer.packing import PackedBatch, pack_step


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Metrics and drift for `StepCompleted`, and the feedback events."""

    metrics: dict[str, float]
    drift: tuple[LagDrift, ...]
    feedback: list[SequenceFeedback]


def loss_of(settings: TrainerSettings) -> Loss:
    """The loss that the settings name. ConfigError for an unknown one."""
    options: dict[str, object] = {"eps_low": settings.eps_low, "eps_high": settings.eps_high}
    options |= {"alpha": settings.sat_alpha} if "sat" in settings.loss else {"denominator": settings.ratio}
    return build_loss(settings.loss, options)


def optimizer_of(settings: TrainerSettings) -> OptimizerSettings:
    """Adam's settings."""
    return OptimizerSettings(
        learning_rate=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.grad_clip,
    )


class StepRunner:
    """Runs steps on one backend with the settings of the run."""

    def __init__(self, backend: Backend, settings: TrainerSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._loss = loss_of(settings)

    def run(self, batch: TrainBatch, data: StepData, identity: StepIdentity) -> StepOutcome:
        """Update the weights once from `data`.

        The result does not depend on `identity`, only its description does.
        """
        started = time.perf_counter()
        packed = pack_step(
            data.sequences,
            aggregation=self._settings.aggregation,
            max_tokens=self._settings.max_tokens_per_microbatch,
        )
        result = self._backend.train_step(packed, self._loss, entropy_bonus=self._settings.entropy_bonus)
        metrics = result.metrics | data_metrics(data) | lag_metrics(packed, identity.ordinal)
        metrics |= {"groups": float(len(batch.groups)), "step_seconds": time.perf_counter() - started}
        return StepOutcome(
            metrics=metrics,
            drift=_drift(packed, result, identity.ordinal),
            feedback=list(sequence_feedback(identity, data, packed, result.facts)),
        )


def data_metrics(data: StepData) -> dict[str, float]:
    """Facts of the batch before training on it."""
    metrics = {
        "sequences": float(len(data.sequences)),
        "tokens": float(sum(sequence.active for sequence in data.sequences)),
        "zero_variance_groups": float(data.zero_variance_groups),
        "unusable_groups": float(data.unusable_groups),
        "unusable_sequences": float(data.unusable_sequences),
    }
    if data.rewards:
        metrics |= {"reward_mean": float(np.mean(data.rewards)), "reward_std": float(np.std(data.rewards))}
    if data.version_spans:
        metrics |= {
            "staleness/version_span_min": float(min(data.version_spans)),
            "staleness/version_span_max": float(max(data.version_spans)),
            "staleness/version_span_mean": float(np.mean(data.version_spans)),
        }
    return metrics


def lag_metrics(packed: Sequence[PackedBatch], ordinal: int) -> dict[str, float]:
    """Mean and largest lag over trainable tokens of published versions, and how many tokens have none."""
    lags = [lags_of(batch.versions, ordinal)[batch.mask] for batch in packed]
    every = np.concatenate(lags) if lags else np.zeros(0, dtype=np.int32)
    known = every[every != NO_LAG]
    metrics = {"tokens_without_lag": float(len(every) - len(known))}
    if len(known):
        metrics |= {"lag_mean": float(known.mean()), "lag_max": float(known.max())}
    return metrics


def _drift(packed: Sequence[PackedBatch], result: StepResult, ordinal: int) -> tuple[LagDrift, ...]:
    if not packed:
        return ()
    rows = drift_by_lag(
        np.concatenate([fact.logprobs for fact in result.facts]),
        np.concatenate([batch.rollout_logprobs for batch in packed]),
        np.concatenate([batch.mask for batch in packed]),
        np.concatenate([batch.versions for batch in packed]),
        ordinal,
    )
    return tuple(rows)
