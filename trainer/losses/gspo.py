"""GSPO (arXiv 2507.18071): one ratio per sequence, the geometric mean of its token ratios.

Every active token of a sequence carries the sequence's loss, so `seq_mean_token_mean` aggregation gives the
paper's objective; token-summing aggregations re-weigh by length. Context and tool tokens count in neither sum
nor length.
"""

from __future__ import annotations

import msgspec
import torch

from trainer.losses.contract import LossInputs, LossOutputs, empty_outputs
from trainer.losses.ppo import check_range
from trainer.losses.surrogate import (
    Denominator,
    Surrogate,
    active_per_sequence,
    clipped_surrogate,
    sequence_log_ratio,
    surrogate_metrics,
    token_log_ratio,
)


class GspoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clip range of the sequence ratio; the paper's own is 3e-4 / 4e-4, with proximal denominators."""

    eps_low: float = 3e-4
    eps_high: float = 4e-4
    denominator: Denominator = "rollout"

    def __post_init__(self) -> None:
        check_range(self.eps_low, self.eps_high)


def gspo_loss(inputs: LossInputs, params: GspoParams) -> LossOutputs:
    """Clipped sequence surrogate, broadcast to the sequence's active tokens."""
    if not bool(inputs.mask.any()):
        return empty_outputs(inputs)
    log_ratio = sequence_log_ratio(inputs, token_log_ratio(inputs, params.denominator))
    surrogate = clipped_surrogate(log_ratio, inputs, 1 - params.eps_low, 1 + params.eps_high)
    metrics = surrogate_metrics(inputs, log_ratio, surrogate) | sequence_metrics(inputs, surrogate)
    return LossOutputs(surrogate.loss, surrogate.clipped, metrics)


def sequence_metrics(inputs: LossInputs, surrogate: Surrogate) -> dict[str, float]:
    """Share of the sequences with active tokens whose ratio was clipped."""
    counts = active_per_sequence(inputs)
    clipped = torch.zeros_like(counts).index_add(0, inputs.sequence_ids, surrogate.clipped.to(counts.dtype))
    live = counts > 0
    return {"sequence_clip_fraction": float((clipped[live] > 0).to(torch.float64).mean())}
