"""What every loss takes and gives: packed 1-D tokens with a sequence index, no padding.

One representation serves padded and packed models, micro-batches and shards: all tokens of a micro-batch lie
in one dimension [N], `sequence_ids` [N] says which of `num_sequences` sequences a token belongs to, and
`mask` says which tokens are trainable (the active set). A loss is pure: `LossInputs -> LossOutputs`.

Invariants:
* `per_token_loss` is already multiplied by the mask, not by any denominator; `trainer.losses.aggregation`
  weighs it.
* A masked token contributes exactly 0 to value and gradient, whatever its log-probs are (NaN included).
* What a loss needs to know of the whole optimizer step (SAT's bandwidth) comes in through
  `LossInputs.bandwidth`, so that the result does not depend on how the step was cut into micro-batches or
  shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Packed tokens of one micro-batch; every tensor is [N] and of one device."""

    logp: Tensor  # current policy, carries the gradient
    logp_rollout: Tensor  # what the engine reported for the sampled token (behaviour policy)
    advantages: Tensor
    mask: Tensor  # bool, the active set
    sequence_ids: Tensor  # int64 in [0, num_sequences)
    num_sequences: int
    logp_prox: Tensor | None = None  # the trainer's own recomputation before the update
    bandwidth: float | None = (
        None  # SAT's quantile over the whole step; None: these tokens are the whole step
    )


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Loss per token [N] (0 where masked), which tokens a clip changed [N], and metrics of the active
    tokens.
    """

    per_token_loss: Tensor
    clipped: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss with its parameters bound, as `trainer.losses.registry.build_loss` makes it."""

    name: str
    evaluate: Callable[[LossInputs], LossOutputs]
    needs_prox: bool = False
    bandwidth: Callable[[LossInputs], float] | None = None  # to be called with all tokens of the step


def empty_outputs(inputs: LossInputs) -> LossOutputs:
    """Nothing is trainable: zero loss that still hangs on the graph, no metrics."""
    zero = torch.where(inputs.mask, inputs.logp, 0.0)
    return LossOutputs(zero, torch.zeros_like(inputs.mask), {})


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean over the active tokens. The active set must not be empty."""
    return float(values.detach()[mask].to(torch.float64).mean())


def combine_metrics(parts: Iterable[tuple[Mapping[str, float], int, int]]) -> dict[str, float]:
    """Metrics of a step from `(metrics, active tokens, active sequences)` of its micro-batches.

    A name with the word `min` or `max` in it takes the extreme, `sequence_*` the mean weighted by sequences, all
    others the mean weighted by tokens, so that the result is what one micro-batch with all tokens would report.
    """
    extremes: dict[str, float] = {}
    sums: dict[str, tuple[float, int]] = {}
    for metrics, tokens, sequences in parts:
        for name, value in metrics.items():
            if "min" in name.split("_"):
                extremes[name] = min(value, extremes.get(name, value))
            elif "max" in name.split("_"):
                extremes[name] = max(value, extremes.get(name, value))
            else:
                weight = sequences if name.startswith("sequence_") else tokens
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value * weight, count + weight)
    return extremes | {name: total / count for name, (total, count) in sums.items() if count}
