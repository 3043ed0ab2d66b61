"""PPO's clipped surrogate (arXiv 1707.06347) with asymmetric range (DAPO, 2503.14476) and dual clip
(1912.09729).

With `denominator = "rollout"` the ratio is current over behaviour policy ("bypass"): the clip then limits the
whole distance from the weights that sampled, lag included. With `"prox"` it limits only this update.
"""

from __future__ import annotations

import msgspec

from trainer.losses.contract import LossInputs, LossOutputs, empty_outputs
from trainer.losses.surrogate import Denominator, clipped_surrogate, surrogate_metrics, token_log_ratio


class PpoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clip range [1 - eps_low, 1 + eps_high]; `dual_clip` = c > 1, or none."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    denominator: Denominator = "rollout"

    def __post_init__(self) -> None:
        check_range(self.eps_low, self.eps_high)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("dual_clip must be above 1")


def check_range(eps_low: float, eps_high: float) -> None:
    """ValueError unless both ends of a clip range are usable."""
    if not 0 <= eps_low <= 1:
        raise ValueError("eps_low must be in [0, 1]")
    if not 0 <= eps_high < float("inf"):
        raise ValueError("eps_high must be finite and not negative")


def ppo_loss(inputs: LossInputs, params: PpoParams) -> LossOutputs:
    """Clipped surrogate per token."""
    if not bool(inputs.mask.any()):
        return empty_outputs(inputs)
    log_ratio = token_log_ratio(inputs, params.denominator)
    surrogate = clipped_surrogate(
        log_ratio, inputs, 1 - params.eps_low, 1 + params.eps_high, params.dual_clip
    )
    return LossOutputs(surrogate.loss, surrogate.clipped, surrogate_metrics(inputs, log_ratio, surrogate))
