"""The clipped surrogate that PPO, GSPO and SAT share, and the log-ratios it acts on.

Three ratios must not be confused: current over proximal (PPO's), current over rollout (SAT's, and PPO in
"bypass"), proximal over rollout (behaviour weight). Log-probs are subtracted and exponentiated once;
probabilities are never divided.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from schemas.errors import InvariantBroken
from trainer.losses.contract import LossInputs, masked_mean

Denominator = Literal["prox", "rollout"]

# exp(20) = 4.9e8 and its square are finite in float32. A larger ratio keeps this value and carries no
# gradient: it would only turn the norm of the whole gradient into infinity.
MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """Loss per token, where the trust region changed it, and where the dual clip did; all [N]."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def token_log_ratio(inputs: LossInputs, denominator: Denominator) -> Tensor:
    """log pi - log pi_denominator per token [N], exactly 0 where masked.

    Raises InvariantBroken where an active token's ratio is NaN or infinite: sorting and clipping would hide
    it.
    """
    base = inputs.logp_rollout if denominator == "rollout" else inputs.logp_prox
    if base is None:
        raise InvariantBroken(
            "the loss divides by proximal log-probs, but none were given", denominator=denominator
        )
    zero = torch.zeros((), dtype=inputs.logp.dtype, device=inputs.logp.device)
    ratio = torch.where(inputs.mask, inputs.logp, zero) - torch.where(inputs.mask, base, zero)
    finite = torch.isfinite(ratio.detach())
    if not bool(finite.all()):
        broken = torch.nonzero(~finite).flatten().tolist()
        raise InvariantBroken("log-ratio is not finite", tokens=len(broken), first=broken[0])
    return ratio


def active_per_sequence(inputs: LossInputs) -> Tensor:
    """Number of active tokens of each sequence, int64 [S]."""
    counts = torch.zeros(inputs.num_sequences, dtype=torch.int64, device=inputs.mask.device)
    return counts.index_add(0, inputs.sequence_ids, inputs.mask.to(torch.int64))


def sequence_log_ratio(inputs: LossInputs, log_ratio: Tensor) -> Tensor:
    """Mean of the token log-ratios over each sequence's active tokens, broadcast to its active tokens [N].

    The gradient flows through the mean. Masked tokens get 0. GSPO (arXiv 2507.18071).
    """
    sums = torch.zeros(inputs.num_sequences, dtype=log_ratio.dtype, device=log_ratio.device)
    sums = sums.index_add(0, inputs.sequence_ids, log_ratio)
    means = sums / active_per_sequence(inputs).clamp_min(1).to(log_ratio.dtype)
    return torch.where(inputs.mask, means[inputs.sequence_ids], torch.zeros_like(log_ratio))


def clipped_surrogate(
    log_ratio: Tensor,
    inputs: LossInputs,
    lower: Tensor | float,
    upper: Tensor | float,
    dual_clip: float | None = None,
) -> Surrogate:
    """-min(r A, clip(r, lower, upper) A), and with `dual_clip` = c at most -c A where A < 0 (arXiv
    1912.09729).

    `lower` and `upper` must be detached. A token counts as clipped iff its clipped loss is strictly larger;
    its gradient is then exactly 0.
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    bounds = (torch.as_tensor(lower, dtype=ratio.dtype), torch.as_tensor(upper, dtype=ratio.dtype))
    low, high = (b.to(ratio.device) for b in bounds)
    plain = -ratio * inputs.advantages
    limited = -torch.clamp(ratio, low, high) * inputs.advantages
    clipped = (limited > plain).detach() & inputs.mask
    loss = torch.where(clipped, limited, plain)
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        cap = -dual_clip * inputs.advantages
        dual_clipped = (inputs.advantages < 0) & (loss.detach() > cap) & inputs.mask
        loss = torch.where(dual_clipped, cap, loss)
    return Surrogate(torch.where(inputs.mask, loss, torch.zeros_like(loss)), clipped, dual_clipped)


def surrogate_metrics(inputs: LossInputs, log_ratio: Tensor, surrogate: Surrogate) -> dict[str, float]:
    """Metrics that every clipped loss logs.

    `mean_abs_log_ratio` is always of tokens, current over rollout.
    """
    drift = (inputs.logp - inputs.logp_rollout).detach()
    return {
        "clip_fraction": masked_mean(surrogate.clipped, inputs.mask),
        "dual_clip_fraction": masked_mean(surrogate.dual_clipped, inputs.mask),
        "approx_kl_k1": masked_mean(-log_ratio, inputs.mask),
        "mean_abs_log_ratio": masked_mean(drift.abs(), inputs.mask),
    }
