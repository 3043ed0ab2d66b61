"""Estimators of KL(pi || reference) from samples of pi, per token, with x = log pi - log reference.

k1 = x is unbiased and signed, but useless as a loss (its gradient has mean zero); k2 = x^2/2 has the gradient
of the reverse KL; k3 = exp(-x) - 1 + x >= 0 is unbiased, written with expm1 because the plain form loses all
digits in float32 near 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_per_token(logp: Tensor, logp_reference: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator per token [N], differentiable in `logp`."""
    x = logp - logp_reference
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x
