"""SAT, the staleness-adaptive trust region (arXiv 2607.18722, Eq. 13-20), per token and per sequence.

    d = log pi - log mu (current over ROLLOUT), q = inverse-CDF alpha-quantile of |d| over the active tokens,
    c = 1 / (1 + (|d|/q)^2) where q > 0 and |d| > q (strict), else 1,
    limits 1 - eps_low c (d < 0) and 1 + eps_high c (d > 0); the other end keeps its radius.

Invariants (proofs in the paper and checked by the tests): the region is contained in PPO's; the loss is never
below PPO's on any token; the limits carry no gradient, so a newly clipped token has gradient exactly 0; with
q = 0, or no token beyond q, the loss is PPO's exactly. The factor is monotone in |d| within one bandwidth
only: a staler batch as a whole has a larger q and a wider region.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.losses.contract import LossInputs, LossOutputs, empty_outputs, masked_mean
from trainer.losses.gspo import sequence_metrics
from trainer.losses.ppo import check_range
from trainer.losses.quantile import inverse_cdf_quantile
from trainer.losses.surrogate import (
    Surrogate,
    clipped_surrogate,
    sequence_log_ratio,
    surrogate_metrics,
    token_log_ratio,
)


class SatParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base range, quantile level, and over which tokens the quantile is taken.

    `scope = "global"`: all tokens of the optimizer step, so that the result does not depend on micro-batching
    or sharding. `"microbatch"` is the paper's; SAT-GSPO's gate then rarely can fire (it needs about ten
    sequences).
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    alpha: float = 0.9
    scope: Literal["global", "microbatch"] = "global"

    def __post_init__(self) -> None:
        check_range(self.eps_low, self.eps_high)
        if not 0 < self.alpha <= 1:
            raise ValueError("alpha must be in (0, 1]")


class TrustRegion(NamedTuple):
    """Factors of the lower and upper radius in (0, 1], and where the gate fired; all [N], detached."""

    c_minus: Tensor
    c_plus: Tensor
    gate: Tensor


def hill(distance: Tensor, bandwidth: float) -> Tensor:
    """1 / (1 + (u/q)^2): 1 at 0, 1/2 at the bandwidth."""
    return 1 / (1 + (distance / bandwidth).square())


def trust_region(log_ratio: Tensor, mask: Tensor, bandwidth: float) -> TrustRegion:
    """The factors of each active token.

    Masked tokens and tokens within the bandwidth have 1 on both sides.
    """
    d = log_ratio.detach()
    ones = torch.ones_like(d)
    if bandwidth <= 0:
        return TrustRegion(ones, ones, torch.zeros_like(mask))
    gate = (d.abs() > bandwidth) & mask
    return TrustRegion(
        torch.where(gate, hill((-d).clamp_min(0), bandwidth), ones),
        torch.where(gate, hill(d.clamp_min(0), bandwidth), ones),
        gate,
    )


def sat_bandwidth(inputs: LossInputs, params: SatParams) -> float:
    """q over these tokens, for the token-level loss; 0 when none is active."""
    return inverse_cdf_quantile(token_log_ratio(inputs, "rollout")[inputs.mask].abs(), params.alpha)


def sat_gspo_bandwidth(inputs: LossInputs, params: SatParams) -> float:
    """q of the sequence log-ratios, each counted once per active token (a token-weighted quantile)."""
    log_ratio = sequence_log_ratio(inputs, token_log_ratio(inputs, "rollout"))
    return inverse_cdf_quantile(log_ratio[inputs.mask].abs(), params.alpha)


def sat_loss(inputs: LossInputs, params: SatParams) -> LossOutputs:
    """Token-level SAT."""
    if not bool(inputs.mask.any()):
        return empty_outputs(inputs)
    log_ratio = token_log_ratio(inputs, "rollout")
    bandwidth = sat_bandwidth(inputs, params) if inputs.bandwidth is None else inputs.bandwidth
    surrogate, metrics = _adaptive(inputs, log_ratio, bandwidth, params)
    return LossOutputs(surrogate.loss, surrogate.clipped, metrics)


def sat_gspo_loss(inputs: LossInputs, params: SatParams) -> LossOutputs:
    """SAT on GSPO's sequence ratio: all tokens of a sequence share one factor."""
    if not bool(inputs.mask.any()):
        return empty_outputs(inputs)
    log_ratio = sequence_log_ratio(inputs, token_log_ratio(inputs, "rollout"))
    bandwidth = sat_gspo_bandwidth(inputs, params) if inputs.bandwidth is None else inputs.bandwidth
    surrogate, metrics = _adaptive(inputs, log_ratio, bandwidth, params)
    return LossOutputs(surrogate.loss, surrogate.clipped, metrics | sequence_metrics(inputs, surrogate))


def _adaptive(
    inputs: LossInputs, log_ratio: Tensor, bandwidth: float, params: SatParams
) -> tuple[Surrogate, dict[str, float]]:
    region = trust_region(log_ratio, inputs.mask, bandwidth)
    low, high = params.eps_low * region.c_minus, params.eps_high * region.c_plus
    surrogate = clipped_surrogate(log_ratio, inputs, 1 - low, 1 + high)
    metrics = surrogate_metrics(inputs, log_ratio, surrogate) | {
        "sat_bandwidth": bandwidth,
        "sat_gate_rate": masked_mean(region.gate, inputs.mask),
        "sat_mean_eff_eps_low": masked_mean(low, inputs.mask),
        "sat_mean_eff_eps_high": masked_mean(high, inputs.mask),
        "sat_min_c": float(torch.minimum(region.c_minus, region.c_plus)[inputs.mask].min()),
    }
    return surrogate, metrics
