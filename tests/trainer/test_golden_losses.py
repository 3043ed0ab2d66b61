"""The losses, advantages and metrics give the golden values in float64 to 1e-12."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.advantages import group_advantages
from trainer.losses.aggregation import sequence_weights
from trainer.losses.contract import LossInputs, LossOutputs
from trainer.losses.drift import mismatch_metrics
from trainer.losses.kl import kl_per_token
from trainer.losses.registry import build_loss
from trainer.losses.sat import SatParams, hill, sat_bandwidth, sat_gspo_bandwidth, trust_region
from trainer.losses.surrogate import sequence_log_ratio, token_log_ratio

TOLERANCE = 1e-12
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_losses.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in GOLDEN["cases"]}
SHARED = GOLDEN["shared_inputs"]
SCALARS = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "constant": "seq-sum-over-const(B*6)",
}
TOKEN_CASES: dict[str, tuple[str, dict[str, object]]] = {
    "ppo_grpo_clip": ("ppo", {"denominator": "prox"}),
    "dapo_clip_higher": ("ppo", {"denominator": "prox", "eps_high": 0.28}),
    "dual_clip": ("ppo", {"denominator": "prox", "dual_clip": 3.0}),
    "dr_grpo": ("ppo", {"denominator": "prox"}),
    "ppo_bypass_rollout_logprob": ("ppo", {"denominator": "rollout"}),
    "sat_grpo_alpha0.9_B4": ("sat", {"alpha": 0.9}),
    "sat_grpo_alpha0.5_B4": ("sat", {"alpha": 0.5}),
    "sat_bites_outward_both": ("sat", {}),
    "sat_pullback_both": ("sat", {}),
    "sat_all_ties": ("sat", {}),
    "sat_degenerate_q0": ("sat", {}),
}
SEQUENCE_CASES: dict[str, tuple[str, dict[str, object]]] = {
    "gspo_paper_range": ("gspo", {"denominator": "prox"}),
    "gspo_0.2": ("gspo", {"denominator": "prox", "eps_low": 0.2, "eps_high": 0.2}),
    "sat_gspo_alpha0.9": ("sat_gspo", {}),
}
TOKEN_CASES |= {name: ("sat", {}) for name in CASES if name.startswith("sat_bites") or "pullback" in name}
TOKEN_CASES = {name: how for name, how in TOKEN_CASES.items() if name in CASES}


def grid(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(name: str) -> LossInputs:
    """The case's rows end to end, padding included as masked tokens: masks have holes anyway."""
    case = CASES[name]
    source = SHARED if isinstance(case["inputs"], list) else case["inputs"]
    mask = grid(source["mask"]) != 0
    if "log_ratio" in source:
        rollout, current, advantages = (
            torch.zeros(mask.shape),
            grid(source["log_ratio"]),
            grid(source["advantage"]),
        )
    else:
        rollout, current = grid(source["logp_rollout"]), grid(source["logp_current"])
        advantages = grid(source["advantage_token"])
    if name == "dr_grpo":
        advantages = torch.from_numpy(group_advantages(source["reward"], std="none"))[:, None].expand(
            mask.shape
        )
    rows, width = mask.shape
    return LossInputs(
        logp=current.flatten().clone().requires_grad_(),
        logp_rollout=rollout.flatten().double(),
        logp_prox=grid(source["logp_prox"]).flatten() if "logp_prox" in source else None,
        advantages=advantages.flatten(),
        mask=mask.flatten(),
        sequence_ids=torch.arange(rows).repeat_interleave(width),
        num_sequences=rows,
    )


def evaluate(name: str) -> tuple[LossInputs, LossOutputs]:
    loss, settings = (TOKEN_CASES | SEQUENCE_CASES)[name]
    inputs = inputs_of(name)
    return inputs, build_loss(loss, settings).evaluate(inputs)


def scalar(inputs: LossInputs, per_token_loss: Tensor, aggregation: str) -> Tensor:
    active = torch.bincount(inputs.sequence_ids[inputs.mask], minlength=inputs.num_sequences).tolist()
    weights = sequence_weights(aggregation, active, range(len(active)), constant_length=6)
    return (torch.from_numpy(weights)[inputs.sequence_ids] * per_token_loss).sum()


def close(actual: Any, expected: Any) -> None:
    left = np.asarray(actual.detach() if isinstance(actual, Tensor) else actual, dtype=np.float64)
    np.testing.assert_allclose(
        left.ravel(), np.asarray(expected, dtype=np.float64).ravel(), rtol=0, atol=TOLERANCE
    )


def test_every_sat_and_gspo_case_is_tested() -> None:
    names = {name for name in CASES if name.startswith(("sat_", "gspo_"))}
    elsewhere = {"sat_gspo_8_equal_sequences_gate_cannot_fire", "sat_effective_upper_cutoff"}
    assert names - elsewhere <= TOKEN_CASES.keys() | SEQUENCE_CASES.keys()


@pytest.mark.parametrize("name", [*TOKEN_CASES, *SEQUENCE_CASES])
def test_loss_per_token(name: str) -> None:
    _, outputs = evaluate(name)
    close(outputs.per_token_loss, CASES[name]["per_token_loss"])


@pytest.mark.parametrize("aggregation", SCALARS)
@pytest.mark.parametrize("name", [*TOKEN_CASES, *SEQUENCE_CASES])
def test_aggregated_loss(name: str, aggregation: str) -> None:
    inputs, outputs = evaluate(name)
    close(scalar(inputs, outputs.per_token_loss, aggregation), CASES[name]["scalar"][SCALARS[aggregation]])


@pytest.mark.parametrize("name", TOKEN_CASES)
def test_gradient_of_the_summed_token_losses(name: str) -> None:
    inputs, outputs = evaluate(name)
    (gradient,) = torch.autograd.grad(outputs.per_token_loss.sum(), inputs.logp)
    close(gradient, CASES[name]["grad"])


@pytest.mark.parametrize("name", SEQUENCE_CASES)
def test_full_gradient_of_the_sequence_losses(name: str) -> None:
    inputs, outputs = evaluate(name)
    (gradient,) = torch.autograd.grad(
        scalar(inputs, outputs.per_token_loss, "seq_mean_token_mean"), inputs.logp
    )
    close(gradient, CASES[name]["grad"])


METRIC_OF_EXTRA = {
    "clipfrac": "clip_fraction",
    "clipfrac_token": "clip_fraction",
    "clipfrac_seq": "sequence_clip_fraction",
    "dual_clipfrac": "dual_clip_fraction",
    "approx_kl_k1": "approx_kl_k1",
    "q": "sat_bandwidth",
    "gate_rate": "sat_gate_rate",
    "mean_eff_eps_low": "sat_mean_eff_eps_low",
    "mean_eff_eps_high": "sat_mean_eff_eps_high",
    "min_c": "sat_min_c",
    "mean_abs_log_ratio": "mean_abs_log_ratio",
}


@pytest.mark.parametrize("name", [*TOKEN_CASES, *SEQUENCE_CASES])
def test_logged_metrics(name: str) -> None:
    _, outputs = evaluate(name)
    extra = CASES[name]["extra"]
    for golden, metric in METRIC_OF_EXTRA.items():
        if golden in extra:
            close(outputs.metrics[metric], extra[golden])


@pytest.mark.parametrize("name", [name for name in TOKEN_CASES if "clipped" in CASES[name].get("extra", {})])
def test_which_tokens_were_clipped(name: str) -> None:
    _, outputs = evaluate(name)
    close(outputs.clipped, CASES[name]["extra"]["clipped"])


@pytest.mark.parametrize("name", [name for name in CASES if "gate" in CASES[name].get("extra", {})])
def test_trust_region_factors(name: str) -> None:
    inputs, extra = inputs_of(name), CASES[name]["extra"]
    params = SatParams(alpha=CASES[name]["params"]["alpha"])
    log_ratio = token_log_ratio(inputs, "rollout")
    bandwidth = sat_bandwidth(inputs, params)
    if "gspo" in name:
        log_ratio = sequence_log_ratio(inputs, log_ratio)
        bandwidth = sat_gspo_bandwidth(inputs, params)
        per_sequence = [log_ratio[inputs.sequence_ids == s].detach().abs().max() for s in range(4)]
        close(per_sequence, np.abs(extra["seq_log_ratio"]))
    region = trust_region(log_ratio, inputs.mask, bandwidth)
    close(bandwidth, extra["q"])
    close(region.c_minus, extra["c_minus"])
    close(region.c_plus, extra["c_plus"])
    close(region.gate, extra["gate"])


@pytest.mark.parametrize("name", [name for name in CASES if "ppo_grad" in CASES[name].get("extra", {})])
def test_ppo_beside_sat(name: str) -> None:
    inputs, extra = inputs_of(name), CASES[name]["extra"]
    outputs = build_loss("ppo").evaluate(inputs)
    (gradient,) = torch.autograd.grad(outputs.per_token_loss.sum(), inputs.logp)
    close(outputs.per_token_loss, extra["ppo_per_token_loss"])
    close(gradient, extra["ppo_grad"])
    close(outputs.metrics["clip_fraction"], extra["ppo_clipfrac"])


def test_gate_of_eight_equal_sequences_cannot_fire() -> None:
    case = CASES["sat_gspo_8_equal_sequences_gate_cannot_fire"]
    given, extra = case["inputs"], case["extra"]
    length, rows = given["length"][0], len(given["length"])
    log_ratio = grid(given["seq_log_ratio"]).repeat_interleave(length)
    inputs = LossInputs(
        logp=log_ratio.clone().requires_grad_(),
        logp_rollout=torch.zeros_like(log_ratio),
        advantages=grid(given["advantage"]).repeat_interleave(length),
        mask=torch.ones_like(log_ratio, dtype=torch.bool),
        sequence_ids=torch.arange(rows).repeat_interleave(length),
        num_sequences=rows,
    )
    outputs = build_loss("sat_gspo").evaluate(inputs)
    total = scalar(inputs, outputs.per_token_loss, "seq_mean_token_mean")
    (gradient,) = torch.autograd.grad(total, inputs.logp)
    close(outputs.metrics["sat_bandwidth"], extra["q"])
    close(outputs.per_token_loss.reshape(rows, length)[:, 0], extra["loss"])
    close(outputs.clipped.reshape(rows, length)[:, 0], extra["clipped"])
    close(total, extra["scalar_seq_mean"])
    close(gradient.reshape(rows, length).sum(1) * rows, extra["dloss_dS"])
    assert outputs.metrics["sat_gate_rate"] == 0


@pytest.mark.parametrize(
    "row", CASES["sat_effective_upper_cutoff"]["extra"]["table"], ids=lambda r: f"q={r['q']:.4f}"
)
def test_effective_upper_cutoff(row: dict[str, float | None]) -> None:
    """The smallest outward d that SAT clips; none where PPO clips before the gate can fire."""
    q, expected = row["q"], row["d_star_upper"]
    assert q is not None
    assert _cutoff(q, 0.2) == (None if expected is None else pytest.approx(expected, abs=1e-12))


def _cutoff(q: float, eps_high: float) -> float | None:
    def clips(d: float) -> bool:
        region = trust_region(grid([d]), torch.tensor([True]), q)
        return math.expm1(d) >= eps_high * float(region.c_plus)

    inert_from = math.log1p(eps_high)
    if q >= inert_from:
        return None
    low, high = q, inert_from
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if clips(middle) else (middle, high)
    return high


def test_hill_is_one_half_at_the_bandwidth() -> None:
    assert hill(grid([0.0, 0.05, 0.1]), 0.05).tolist() == [1.0, 0.5, 0.2]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator: Any) -> None:
    extra = CASES["kl_estimators"]["extra"]
    mask = grid(SHARED["mask"]) != 0
    logp = grid(SHARED["logp_current"]).requires_grad_()
    tokens = torch.where(mask, kl_per_token(logp, grid(SHARED["logp_ref"]), estimator), 0.0)
    (gradient,) = torch.autograd.grad(tokens.sum(), logp)
    close(tokens, extra[f"{estimator}_tok"])
    close(tokens.sum() / mask.sum(), extra[estimator])
    close(gradient, extra[f"grad_{estimator}"])


def test_mismatch_metrics() -> None:
    def flat(key: str) -> NDArray[np.float64]:
        return np.asarray(SHARED[key], dtype=np.float64).ravel()

    extra = CASES["mismatch_metrics"]["extra"]
    mask, rows = flat("mask") != 0, np.repeat(np.arange(4), 6)
    metrics = mismatch_metrics(flat("logp_prox"), flat("logp_rollout"), mask, rows)
    assert metrics == pytest.approx(
        {
            "logprob_abs_diff": extra["train_rollout_logprob_abs_diff_tokenmean"],
            "sequence_logprob_abs_diff": extra["train_rollout_logprob_abs_diff_slime_seqmean"],
            "kl_k1_rollout_to_train": extra["kl_k1_rollout_to_train"],
            "kl_k3_rollout_to_train": extra["kl_k3_rollout_to_train"],
            "effective_sample_size": extra["ess_token_raw"],
        },
        abs=TOLERANCE,
    )


def test_group_advantages() -> None:
    extra = CASES["advantages"]["extra"]
    for std in ("bessel", "population", "none"):
        close(group_advantages(extra["reward"], std=std), extra[std])
    group = len(extra["reward"])
    close(group_advantages(extra["reward"], std="none") * group / (group - 1), extra["rloo"])
    close(group_advantages(extra["unbalanced_reward"]), extra["unbalanced_bessel"])
    close(group_advantages(extra["unbalanced_reward"], std="population"), extra["unbalanced_population"])
    assert group_advantages([1.1] * 4).tolist() == extra["zero_variance_bessel"]
    nearly_equal = group_advantages([0.1, 0.1, 0.1, 0.1 + 1e-9], tolerance=0)
    close(nearly_equal, extra["near_zero_variance_bessel"])
