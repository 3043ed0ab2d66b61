"""How far the trainer's log-probs are from the rollout's: `logprob_drift`, as a whole and by lag.

Drift at lag 0 is pure engine mismatch (the same weights, other kernels); what rises with lag is staleness.
numpy only: the numbers are facts about a finished step, not part of a loss. All arrays are [N] over packed
tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.events import LagDrift

Floats = NDArray[np.float32] | NDArray[np.float64]


def drift_by_lag(
    logp: Floats,
    logp_rollout: Floats,
    mask: NDArray[np.bool_],
    versions: NDArray[np.int32],
    trained_on: int,
) -> list[LagDrift]:
    """One row per lag, ascending. `trained_on` is the ordinal of the weights that computed `logp`.

    Tokens without a published version (negative ordinal) belong to no lag and are left out.
    """
    known = mask & (versions >= 0)
    drift = logp[known].astype(np.float64) - logp_rollout[known].astype(np.float64)
    lags = trained_on - versions[known]
    rows = []
    for lag in np.unique(lags):
        at = drift[lags == lag]
        size = np.abs(at)
        rows.append(
            LagDrift(
                int(lag), len(at), float(at.mean()), mean_abs=float(size.mean()), max_abs=float(size.max())
            )
        )
    return rows


def mismatch_metrics(
    logp: Floats, logp_rollout: Floats, mask: NDArray[np.bool_], sequence_ids: NDArray[np.int64]
) -> dict[str, float]:
    """Mean |drift| (token mean and mean of sequence means), KL(rollout || trainer), effective sample size.

    k1 is signed, k3 is not negative; the effective sample size is (sum w)^2 / (N sum w^2) of w = exp(drift),
    in (0, 1]. Nothing active: no metrics.
    """
    if not mask.any():
        return {}
    drift = logp[mask].astype(np.float64) - logp_rollout[mask].astype(np.float64)
    owner = sequence_ids[mask]
    sums = np.bincount(owner, weights=np.abs(drift))
    counts = np.bincount(owner)
    weights = np.exp(drift - drift.max())  # the common factor cancels, and nothing overflows
    return {
        "logprob_abs_diff": float(np.abs(drift).mean()),
        "sequence_logprob_abs_diff": float((sums[counts > 0] / counts[counts > 0]).mean()),
        "kl_k1_rollout_to_train": float(-drift.mean()),
        "kl_k3_rollout_to_train": float((np.expm1(drift) - drift).mean()),
        "effective_sample_size": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }
