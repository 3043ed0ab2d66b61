"""The inverse-CDF quantile: the smallest observed value x with F_hat(x) >= alpha.

An order statistic, never an interpolation: torch's default ("linear") and "higher" give other values, and
`torch.quantile` refuses more than 16 M elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from schemas.errors import InvariantBroken


def rank_of(alpha: float, count: int) -> int:
    """The smallest integer k in [1, count] with k / count >= alpha, compared as the floats that F_hat
    takes.
    """
    k = min(max(math.ceil(alpha * count), 1), count)
    while k > 1 and (k - 1) / count >= alpha:  # alpha * count may round up past an integer
        k -= 1
    while k < count and k / count < alpha:
        k += 1
    return k


def inverse_cdf_quantile(values: Tensor, alpha: float) -> float:
    """inf{x : F_hat(x) >= alpha} of `values` [N]; 0 for none. Raises InvariantBroken on NaN or infinity."""
    if values.numel() == 0:
        return 0.0
    flat = values.detach().flatten()
    if not bool(torch.isfinite(flat).all()):
        raise InvariantBroken("quantile of values that are not finite", count=flat.numel())
    return float(torch.kthvalue(flat, rank_of(alpha, flat.numel())).values)
