"""Laws of the losses over random batches: pessimism, containment, reduction to PPO, invariance to cutting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schemas.errors import ConfigError, InvariantBroken
from trainer.losses.aggregation import AGGREGATIONS, sequence_weights
from trainer.losses.contract import LossInputs, LossOutputs, combine_metrics
from trainer.losses.quantile import inverse_cdf_quantile, rank_of
from trainer.losses.registry import LOSSES, build_loss
from trainer.losses.sat import trust_region

LOG_RATIOS = st.floats(-3, 3, allow_nan=False).map(lambda x: round(x, 4))
ALL_LOSSES = [
    ("ppo", {}),
    ("ppo", {"dual_clip": 3.0, "eps_high": 0.28}),
    ("gspo", {"eps_low": 0.2, "eps_high": 0.2}),
    ("sat", {"alpha": 0.7}),
    ("sat_gspo", {"alpha": 0.5}),
]


@st.composite
def batches(draw: st.DrawFn) -> LossInputs:
    """1-6 sequences of 1-8 tokens, at least one token active, one advantage per sequence."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    total = sum(lengths)
    log_ratios = draw(st.lists(LOG_RATIOS, min_size=total, max_size=total))
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total).filter(any))
    advantages = draw(st.lists(st.floats(-3, 3), min_size=len(lengths), max_size=len(lengths)))
    ids = torch.repeat_interleave(torch.tensor(lengths))
    return LossInputs(
        logp=torch.tensor(log_ratios, dtype=torch.float64).requires_grad_(),
        logp_rollout=torch.zeros(total, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64)[ids],
        mask=torch.tensor(mask),
        sequence_ids=ids,
        num_sequences=len(lengths),
    )


def gradient(inputs: LossInputs, outputs: LossOutputs) -> Tensor:
    (grad,) = torch.autograd.grad(outputs.per_token_loss.sum(), inputs.logp)
    return grad


@pytest.mark.parametrize(("adaptive", "plain"), [("sat", "ppo"), ("sat_gspo", "gspo")])
@given(inputs=batches(), alpha=st.floats(0.05, 1.0))
def test_sat_is_never_below_its_fixed_region(
    adaptive: str, plain: str, inputs: LossInputs, alpha: float
) -> None:
    sat = build_loss(adaptive, {"alpha": alpha}).evaluate(inputs)
    ppo = build_loss(plain, {"eps_low": 0.2, "eps_high": 0.2}).evaluate(inputs)
    assert bool((sat.per_token_loss >= ppo.per_token_loss).all())


@given(inputs=batches(), bandwidth=st.integers(0, 200_000).map(lambda n: n / 1e5))
def test_region_is_contained_and_moves_one_end_only(inputs: LossInputs, bandwidth: float) -> None:
    d = inputs.logp.detach()
    region = trust_region(d, inputs.mask, bandwidth)
    for factor in (region.c_minus, region.c_plus):
        assert bool(((factor > 0) & (factor <= 1)).all())
    gated = region.gate
    assert torch.equal(gated, inputs.mask & (d.abs() > bandwidth) & (bandwidth > 0))
    moved = torch.where(d > 0, region.c_plus, region.c_minus)
    kept = torch.where(d > 0, region.c_minus, region.c_plus)
    assert bool((moved[gated] < 0.5).all())
    assert bool((kept == 1).all())
    assert bool((moved[~gated] == 1).all())


@given(inputs=batches())
def test_sat_is_exactly_ppo_when_no_token_is_gated(inputs: LossInputs) -> None:
    sat = build_loss("sat", {"alpha": 1.0}).evaluate(inputs)
    ppo = build_loss("ppo").evaluate(inputs)
    assert torch.equal(sat.per_token_loss, ppo.per_token_loss)
    assert torch.equal(gradient(inputs, sat), gradient(inputs, ppo))
    assert sat.metrics["sat_gate_rate"] == 0


@given(inputs=batches(), alpha=st.floats(0.05, 1.0))
def test_gradient_is_zero_where_clipped_and_ppos_elsewhere(inputs: LossInputs, alpha: float) -> None:
    sat = build_loss("sat", {"alpha": alpha}).evaluate(inputs)
    expected = torch.where(inputs.mask, -inputs.advantages * inputs.logp.detach().exp(), 0.0)
    expected[sat.clipped] = 0
    assert torch.equal(gradient(inputs, sat), expected)


@given(inputs=batches(), alpha=st.floats(0.05, 0.95))
def test_gate_rate_never_exceeds_one_minus_alpha(inputs: LossInputs, alpha: float) -> None:
    for name in ("sat", "sat_gspo"):
        assert (
            build_loss(name, {"alpha": alpha}).evaluate(inputs).metrics["sat_gate_rate"] <= 1 - alpha + 1e-12
        )


@settings(deadline=None)
@pytest.mark.parametrize(("name", "options"), ALL_LOSSES)
@given(inputs=batches(), cut=st.integers(1, 5))
def test_result_does_not_depend_on_micro_batches(
    name: str, options: dict[str, object], inputs: LossInputs, cut: int
) -> None:
    loss = build_loss(name, options)
    whole = loss.evaluate(inputs)
    bandwidth = None if loss.bandwidth is None else loss.bandwidth(inputs)
    losses, gradients, metrics = [], [], []
    for part in cut_in_two(inputs, cut):
        outputs = loss.evaluate(replace(part, bandwidth=bandwidth))
        losses.append(outputs.per_token_loss.detach())
        gradients.append(torch.autograd.grad(outputs.per_token_loss.sum(), inputs.logp)[0])
        active_ids = part.sequence_ids[part.mask]
        metrics.append((outputs.metrics, int(part.mask.sum()), len(set(active_ids.tolist()))))
    torch.testing.assert_close(torch.cat(losses), whole.per_token_loss.detach(), rtol=0, atol=0)
    torch.testing.assert_close(sum(gradients), gradient(inputs, whole), rtol=1e-14, atol=1e-14)
    assert combine_metrics(metrics) == pytest.approx(whole.metrics, rel=1e-12, abs=1e-12)


def cut_in_two(inputs: LossInputs, cut: int) -> list[LossInputs]:
    """Sequences before `cut` and from it on, as batches of their own that hang on the same leaf."""
    parts = []
    for low, high in ((0, min(cut, inputs.num_sequences)), (cut, inputs.num_sequences)):
        at = torch.nonzero((inputs.sequence_ids >= low) & (inputs.sequence_ids < high)).flatten()
        part = LossInputs(
            logp=inputs.logp[at],
            logp_rollout=inputs.logp_rollout[at],
            advantages=inputs.advantages[at],
            mask=inputs.mask[at],
            sequence_ids=inputs.sequence_ids[at] - low,
            num_sequences=max(high - low, 0),
        )
        if len(at):
            parts.append(part)
    return parts


@given(inputs=batches(), poison=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_masked_tokens_contribute_nothing_whatever_they_hold(inputs: LossInputs, poison: float) -> None:
    hidden = torch.where(inputs.mask, inputs.logp_rollout, poison)
    for name in LOSSES:
        outputs = build_loss(name).evaluate(replace(inputs, logp_rollout=hidden))
        assert torch.equal(outputs.per_token_loss, build_loss(name).evaluate(inputs).per_token_loss)
        assert bool((gradient(inputs, outputs)[~inputs.mask] == 0).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_active_token_that_is_not_finite_is_refused(name: str, poison: float) -> None:
    inputs = two_tokens(rollout=[-1.0, poison])
    with pytest.raises(InvariantBroken) as refused:
        build_loss(name).evaluate(inputs)
    assert refused.value.detail == {"tokens": 1, "first": 1}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_empty_active_set_gives_zero_loss_and_gradient(name: str) -> None:
    inputs = replace(two_tokens(rollout=[-1.0, -2.0]), mask=torch.tensor([False, False]))
    outputs = build_loss(name).evaluate(inputs)
    assert outputs.per_token_loss.tolist() == [0, 0]
    assert gradient(inputs, outputs).tolist() == [0, 0]
    assert outputs.metrics == {}
    bandwidth = build_loss(name).bandwidth
    assert bandwidth is None or bandwidth(inputs) == 0


def two_tokens(rollout: list[float]) -> LossInputs:
    return LossInputs(
        logp=torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True),
        logp_rollout=torch.tensor(rollout, dtype=torch.float64),
        advantages=torch.ones(2, dtype=torch.float64),
        mask=torch.tensor([True, True]),
        sequence_ids=torch.tensor([0, 0]),
        num_sequences=1,
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratio_beyond_float32_has_finite_loss_and_gradient(advantage: float) -> None:
    inputs = LossInputs(
        logp=torch.tensor([-0.5], requires_grad=True),
        logp_rollout=torch.tensor([-120.0]),
        advantages=torch.tensor([advantage]),
        mask=torch.tensor([True]),
        sequence_ids=torch.tensor([0]),
        num_sequences=1,
    )
    outputs = build_loss("ppo").evaluate(inputs)
    assert bool(torch.isfinite(outputs.per_token_loss).all())
    assert gradient(inputs, outputs).tolist() == [0.0]


@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=40), alpha=st.floats(0.01, 1.0))
def test_quantile_is_the_smallest_value_that_covers_alpha(values: list[float], alpha: float) -> None:
    data = torch.tensor(values, dtype=torch.float64)
    quantile = inverse_cdf_quantile(data, alpha)
    covering = [x for x in values if np.mean(np.array(values) <= x) >= alpha]
    assert quantile == min(covering)


@pytest.mark.parametrize(
    ("alpha", "count", "rank"),
    [(0.9, 20, 18), (0.9, 10, 9), (0.7, 10, 7), (1.0, 7, 7), (1e-9, 7, 1), (0.9, 1, 1)],
)
def test_rank_of_the_quantile(alpha: float, count: int, rank: int) -> None:
    assert rank_of(alpha, count) == rank


def test_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gspo, ppo, sat, sat_gspo") as refused:
        build_loss("sta")
    assert refused.value.detail == {"name": "sta", "known": ["gspo", "ppo", "sat", "sat_gspo"]}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ppo", {"eps": 0.2}),
        ("ppo", {"eps_low": -0.1}),
        ("ppo", {"eps_high": float("inf")}),
        ("ppo", {"dual_clip": 1.0}),
        ("ppo", {"denominator": "current"}),
        ("sat", {"alpha": 0.0}),
        ("sat_gspo", {"scope": "batch"}),
    ],
)
def test_wrong_loss_setting_is_refused(name: str, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"loss '{name}'"):
        build_loss(name, wrong)


def test_prox_denominator_without_prox_is_refused() -> None:
    loss = build_loss("ppo", {"denominator": "prox"})
    assert loss.needs_prox
    with pytest.raises(InvariantBroken):
        loss.evaluate(two_tokens(rollout=[-1.0, -1.0]))


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 6, 1 / 6, 0, 1 / 6]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 0, 1 / 3]),
        ("seq_mean_token_mean", [1 / 9, 1 / 3, 0, 1 / 6]),
        ("constant", [1 / 40, 1 / 40, 0, 1 / 40]),
        ("prompt_equal", [1 / 8, 1 / 8, 0, 1 / 4]),
    ],
)
def test_sequence_weights(aggregation: str, weights: list[float]) -> None:
    actual = sequence_weights(aggregation, [3, 1, 0, 2], ["p", "p", "p", "q"], constant_length=10)
    assert actual.tolist() == pytest.approx(weights)


def test_nothing_trainable_has_no_weight() -> None:
    for aggregation in AGGREGATIONS:
        assert sequence_weights(aggregation, [0, 0], ["p", "q"], constant_length=1).tolist() == [0, 0]


def test_aggregation_errors_name_what_is_known() -> None:
    with pytest.raises(ConfigError, match="token_mean, seq_mean_token_sum"):
        sequence_weights("mean", [1], ["p"])
    with pytest.raises(ConfigError, match="constant_length"):
        sequence_weights("constant", [1], ["p"])
