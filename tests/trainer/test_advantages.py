"""Rule 8: statistics over anchors, broadcast to lineages, equal rewards exactly 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError, InvariantBroken
from trainer.advantages import RewardedLineage, group_advantages, lineage_advantages
from trainer.losses.aggregation import prompt_equal_denominators


def anchor(name: str, trajectory: str, reward: float | None, *, excluded: bool = False) -> RewardedLineage:
    return RewardedLineage(name, trajectory, is_anchor=True, reward=reward, excluded=excluded)


def branch(name: str, trajectory: str, reward: float | None = None) -> RewardedLineage:
    return RewardedLineage(name, trajectory, is_anchor=False, reward=reward)


def test_anchor_advantage_is_broadcast_to_the_lineages_of_its_trajectory() -> None:
    group = [branch("a", "t1"), anchor("c", "t1", 2.0), branch("b", "t1"), anchor("d", "t2", 4.0)]
    assert lineage_advantages(group, std="none") == {"a": -1, "c": -1, "b": -1, "d": 1}


def test_only_the_anchors_reward_counts() -> None:
    group = [branch("a", "t1", 100.0), anchor("b", "t1", 2.0), anchor("c", "t2", 4.0)]
    assert lineage_advantages(group, std="none") == {"a": -1, "b": -1, "c": 1}


def test_excluded_trajectories_take_no_part() -> None:
    group = [anchor("a", "t1", 2.0), anchor("b", "t2", 4.0), anchor("c", "t3", 100.0, excluded=True)]
    assert lineage_advantages(group, std="none") == {"a": -1, "b": 1}


def test_trajectory_without_anchor_is_refused() -> None:
    with pytest.raises(InvariantBroken) as refused:
        lineage_advantages([anchor("a", "t1", 1.0), branch("b", "t2", 2.0)])
    assert refused.value.detail == {"parent_traj_id": "t2"}


def test_anchor_without_reward_is_refused() -> None:
    with pytest.raises(InvariantBroken) as refused:
        lineage_advantages([anchor("a", "t1", 1.0), anchor("b", "t2", None)])
    assert refused.value.detail == {"parent_traj_id": "t2", "lineage_id": "b"}


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_fewer_than_two_rewards_are_refused(rewards: list[float]) -> None:
    with pytest.raises(InvariantBroken) as refused:
        group_advantages(rewards)
    assert refused.value.detail == {"group_size": len(rewards)}


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(InvariantBroken):
        group_advantages([0.0, reward])


def test_unknown_std_is_refused() -> None:
    with pytest.raises(ConfigError):
        group_advantages([0.0, 1.0], std="sample")  # type: ignore[arg-type]


@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 64))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert group_advantages([reward] * size).tolist() == [0.0] * size


def test_equal_rewards_whose_mean_is_off_in_float32_give_exactly_zero() -> None:
    assert group_advantages(np.full(55, 1.1, dtype=np.float32).tolist()).tolist() == [0.0] * 55


@given(rewards=st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=16))
def test_advantages_are_centred_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert abs(advantages.sum()) < 1e-9
    order = np.argsort(rewards, kind="stable")
    assert bool(np.all(np.diff(advantages[order]) >= 0))


@pytest.mark.parametrize(
    ("active", "prompts", "denominators"),
    [
        ([2, 2], ["p1", "p2"], [1.0, 1.0]),
        ([3, 2, 2, 4], ["p1", "p1", "p1", "p2"], [3.5, 3.5, 3.5, 2.0]),
    ],
)
def test_prompt_equal_denominators(active: list[int], prompts: list[str], denominators: list[float]) -> None:
    assert prompt_equal_denominators(active, prompts, 4).tolist() == denominators
