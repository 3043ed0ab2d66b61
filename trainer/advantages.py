"""GRPO group statistics (rule 8): advantages of complete groups, float64, equal rewards exactly 0.

The reward of a trajectory sits on its anchor, the last lineage in time; mean and standard deviation are taken
over the anchors of a group, and the anchor's advantage is broadcast to all lineages of its trajectory. A
trajectory that split into many lineages therefore counts once.

Statistics are float64 because in float32 the mean of equal rewards need not equal them: 55 rewards of 1.1
then give |A| = 0.1 instead of 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, InvariantBroken

Std = Literal["bessel", "population", "none"]


@dataclass(frozen=True, slots=True)
class RewardedLineage:
    """One lineage of a group. The reward counts on the anchor only, the trajectory's last lineage in time."""

    lineage_id: str
    parent_traj_id: str
    is_anchor: bool
    reward: float | None
    excluded: bool = False


def group_advantages(
    rewards: Sequence[float], *, std: Std = "bessel", eps: float = 1e-6, tolerance: float = 1e-8
) -> NDArray[np.float64]:
    """(R - mean) / (std + eps) of one group [G], float64; `std = "none"` leaves the centred reward (Dr.GRPO).

    Exactly 0 for all when max - min <= tolerance * (1 + |max|). Raises InvariantBroken for fewer than two
    rewards or one that is not finite: with one member there is no group statistic.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise InvariantBroken("group statistics need at least two rewards", group_size=int(values.size))
    if not np.isfinite(values).all():
        raise InvariantBroken("a reward is not finite", rewards=[float(v) for v in values])
    if values.max() - values.min() <= tolerance * (1 + abs(values.max())):
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    match std:
        case "none":
            return centred
        case "bessel":
            return np.asarray(centred / (values.std(ddof=1) + eps))
        case "population":
            return np.asarray(centred / (values.std(ddof=0) + eps))
        case _:
            raise ConfigError(f"unknown std {std!r}; known: bessel, population, none", std=std)


def lineage_advantages(
    lineages: Iterable[RewardedLineage], *, std: Std = "bessel", eps: float = 1e-6
) -> dict[str, float]:
    """Advantage of every live lineage of one group, by lineage_id.

    Excluded lineages take no part in the statistics and are not in the result; a trajectory all of whose
    lineages are excluded does not count as a member of the group.
    """
    live = [lineage for lineage in lineages if not lineage.excluded]
    anchors = {lineage.parent_traj_id: lineage for lineage in live if lineage.is_anchor}
    for lineage in live:
        if lineage.parent_traj_id not in anchors:
            raise InvariantBroken("a trajectory has no anchor", parent_traj_id=lineage.parent_traj_id)
    advantages = group_advantages([_reward(anchor) for anchor in anchors.values()], std=std, eps=eps)
    of_trajectory = dict(zip(anchors, advantages.tolist(), strict=True))
    return {lineage.lineage_id: of_trajectory[lineage.parent_traj_id] for lineage in live}


def _reward(anchor: RewardedLineage) -> float:
    if anchor.reward is None:
        raise InvariantBroken(
            "the anchor of a complete group has no reward",
            parent_traj_id=anchor.parent_traj_id,
            lineage_id=anchor.lineage_id,
        )
    return anchor.reward
