"""Packing: nothing lost, weights from the whole step, cuts bounded, shards disjoint, order kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError, InvariantBroken
from schemas.events import LagDrift
from trainer.losses.drift import drift_by_lag
from trainer.packing import (
    PackedBatch,
    TrainSequence,
    cut_micro_batches,
    has_finite_logprobs,
    pack_step,
    shard,
)

LENGTHS = st.lists(st.integers(1, 30), max_size=20)


def sequence(key: str, length: int, *, prompt: str = "p", start: int = 0) -> TrainSequence:
    mask = np.ones(length, dtype=np.uint8)
    mask[0] = 0
    return TrainSequence(
        key=key,
        prompt=prompt,
        tokens=np.arange(start, start + length, dtype=np.int32),
        mask=mask,
        rollout_logprobs=np.where(mask != 0, -0.5, 0).astype(np.float32),
        versions=np.where(mask != 0, 3, -1).astype(np.int32),
        advantage=float(length),
    )


def test_columns_lie_end_to_end() -> None:
    sequences = [sequence("a", 3), sequence("b", 2, start=10)]
    (batch,) = pack_step(sequences, aggregation="token_mean", max_tokens=100)
    assert batch.tokens.tolist() == [0, 1, 2, 10, 11]
    assert batch.mask.tolist() == [False, True, True, False, True]
    assert batch.versions.tolist() == [-1, 3, 3, -1, 3]
    assert batch.rollout_logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert batch.advantages.tolist() == [3, 3, 3, 2, 2]
    assert batch.weights.tolist() == [1 / 3] * 5
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert batch.boundaries.tolist() == [0, 3, 5]
    assert (batch.indices, batch.active, batch.active_sequences) == ((0, 1), 3, 2)


@given(lengths=LENGTHS.filter(bool), max_tokens=st.integers(1, 100), ranks=st.integers(1, 4))
def test_every_sequence_is_packed_once_with_its_step_wide_weight(
    lengths: list[int], max_tokens: int, ranks: int
) -> None:
    sequences = [sequence(f"s{i}", n, prompt=f"p{i % 3}", start=1000 * i) for i, n in enumerate(lengths)]
    (whole,) = pack_step(sequences, aggregation="prompt_equal", max_tokens=10**6)
    parts = [
        pack_step(sequences, aggregation="prompt_equal", max_tokens=max_tokens, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    found = [piece for rank in parts for batch in rank for piece in pieces(batch)]
    assert sorted(found) == sorted(pieces(whole))


def pieces(batch: PackedBatch) -> list[tuple[int, list[int], list[float]]]:
    bounds = zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True)
    return [
        (index, batch.tokens[low:high].tolist(), batch.weights[low:high].tolist())
        for index, (low, high) in zip(batch.indices, bounds, strict=True)
    ]


@given(lengths=LENGTHS, max_tokens=st.integers(1, 100))
def test_micro_batches_are_bounded_consecutive_runs(lengths: list[int], max_tokens: int) -> None:
    cuts = cut_micro_batches(lengths, max_tokens)
    assert [i for cut in cuts for i in cut] == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[i] for i in cut) <= max_tokens


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_shards_are_disjoint_complete_and_balanced(lengths: list[int], ranks: int) -> None:
    shards = [shard(lengths, rank, ranks) for rank in range(ranks)]
    assert sorted(i for part in shards for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in shards]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert all(part == sorted(part) for part in shards)


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError):
        shard([1], 2, 2)


def test_micro_batch_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError):
        cut_micro_batches([1], 0)


def test_trainable_first_token_is_refused() -> None:
    good = sequence("a", 3)
    mask = np.ones(3, dtype=np.uint8)
    with pytest.raises(InvariantBroken):
        TrainSequence("a", "p", good.tokens, mask, good.rollout_logprobs, good.versions, 0.0)


def test_columns_of_different_length_are_refused() -> None:
    good = sequence("a", 3)
    with pytest.raises(InvariantBroken):
        TrainSequence("a", "p", good.tokens, good.mask[:2], good.rollout_logprobs, good.versions, 0.0)


def test_sequence_with_a_trainable_log_prob_that_is_not_finite_is_unusable() -> None:
    bad, hidden = sequence("a", 3), sequence("b", 3)
    bad.rollout_logprobs[1] = -np.inf
    hidden.rollout_logprobs[0] = np.nan
    assert [has_finite_logprobs(s) for s in (bad, hidden, sequence("c", 3))] == [False, True, True]


def test_drift_by_lag_groups_published_active_tokens() -> None:
    rows = drift_by_lag(
        logp=np.array([-1.0, -1.0, -1.0, -1.0, -1.0], dtype=np.float32),
        logp_rollout=np.array([-1.0, -1.5, -0.5, -9.0, -9.0], dtype=np.float32),
        mask=np.array([True, True, True, True, False]),
        versions=np.array([5, 3, 3, -1, 5], dtype=np.int32),
        trained_on=5,
    )
    assert rows == [LagDrift(0, 1, 0.0, 0.0, 0.0), LagDrift(2, 2, 0.0, 0.5, 0.5)]
