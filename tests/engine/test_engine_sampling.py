"""Draws from logits: the right distribution, the right log-probability, and nothing but seed and position
as noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stack.engine.sampling import NO_TOP_K, Sampling, adjust, draw, truncate, uniforms

LOGITS = torch.tensor([2.0, 0.0, 1.0, -3.0, 0.5])


def sample(logits: torch.Tensor, seeds: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    rows = len(seeds)
    noise = torch.from_numpy(uniforms(seeds.astype(np.uint64), np.zeros(rows, np.int64)))
    return draw(logits.expand(rows, -1), torch.full((rows,), temperature), noise).tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_softmax(temperature: float) -> None:
    drawn = sample(LOGITS, np.arange(40_000), temperature)
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    expected = torch.softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0.0)


def test_logprob_is_of_the_tempered_distribution_before_truncation() -> None:
    truncation = (torch.tensor([2]), torch.tensor([0.9], dtype=torch.float64), torch.tensor([0.0]))
    drawn = draw(
        LOGITS[None], torch.tensor([0.7]), torch.tensor([0.99], dtype=torch.float64), truncation=truncation
    )
    assert drawn.tokens.item() == 2  # the second of the two that top-k leaves
    assert drawn.logprobs.item() == pytest.approx(torch.log_softmax(LOGITS / 0.7, -1)[2].item(), abs=1e-6)


def test_greedy_rows_take_the_argmax_beside_sampled_rows() -> None:
    noise = torch.tensor([0.999, 0.999], dtype=torch.float64)
    drawn = draw(LOGITS.expand(2, -1), torch.ones(2), noise, greedy=torch.tensor([True, False]))
    assert drawn.tokens.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "left"),
    [
        (2, 1.0, 0.0, [0, 2]),
        (NO_TOP_K, 0.5, 0.0, [0]),
        (NO_TOP_K, 0.7, 0.0, [0, 2]),
        (NO_TOP_K, 1.0, 0.2, [0, 2, 4]),
        (1, 1.0, 0.9, [0]),
        (NO_TOP_K, 1.0, 0.0, [0, 1, 2, 3, 4]),
    ],
)
def test_truncation_leaves(top_k: int, top_p: float, min_p: float, left: list[int]) -> None:
    weights = torch.exp(LOGITS - LOGITS.max())[None]
    kept = truncate(
        weights, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64), torch.tensor([min_p])
    )
    assert kept[0].nonzero().flatten().tolist() == left


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([5, 5, 6], np.uint64), np.array([1, 2, 1], np.int64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_noise_is_uniform_over_seeds_and_over_positions() -> None:
    for values in (
        uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64)),
        uniforms(np.zeros(20_000, np.uint64), np.arange(20_000)),
    ):
        counts = np.histogram(values, bins=20, range=(0.0, 1.0))[0]
        assert abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_noise_of_a_seed_never_changes() -> None:
    """Literal values: recorded runs must repeat with every later release."""
    assert uniforms(np.array([0, 42], np.uint64), np.array([0, 7])).tolist() == [
        0.6524484864203259,
        0.08603176020551473,
    ]


def test_penalties_act_on_produced_tokens() -> None:
    logits = torch.tensor([2.0, -1.0, 1.0])
    adjust(
        logits,
        Sampling(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25),
        [0, 0, 1],
        frozenset(),
    )
    assert logits.tolist() == [2.0 / 2.0 - 2 * 0.5 - 0.25, -1.0 * 2.0 - 0.5 - 0.25, 1.0]


def test_end_tokens_are_impossible_before_min_new_tokens() -> None:
    logits = torch.zeros(3)
    adjust(logits, Sampling(min_new_tokens=2), [5], frozenset({1}))
    assert logits.tolist() == [0.0, -math.inf, 0.0]
    logits = torch.zeros(3)
    adjust(logits, Sampling(min_new_tokens=2), [5, 5], frozenset({1}))
    assert logits.tolist() == [0.0, 0.0, 0.0]
