"""From the sequences of one optimizer step to packed micro-batches of this rank.

Order of work, and why: loss weights over ALL sequences first (so that no cut can change the result), then the
shard of this data-parallel rank, then micro-batches in the given order, then one flat array per column.
Everything is a pure function of the sequences' order, which the batch manifest fixes: a step that is trained
again packs identically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, InvariantBroken
from trainer.losses.aggregation import sequence_weights


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One lineage, ready to be trained on; all columns are [T]."""

    key: str  # lineage_id, for feedback
    prompt: str  # group_id, for prompt_equal weights
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]  # 1 where the token was sampled and keeps its loss
    rollout_logprobs: NDArray[np.float32]  # 0 where not sampled
    versions: NDArray[np.int32]  # ordinal of the weights that sampled the token, -1 for context
    advantage: float

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.mask), len(self.rollout_logprobs), len(self.versions)}
        if len(lengths) != 1 or not len(self.tokens):
            raise InvariantBroken(
                "columns of a sequence differ in length", key=self.key, lengths=sorted(lengths)
            )
        if self.mask[0]:
            raise InvariantBroken(
                "the first token of a sequence has no context to be predicted from", key=self.key
            )

    @property
    def length(self) -> int:
        """Tokens, context included."""
        return len(self.tokens)

    @property
    def active(self) -> int:
        """Trainable tokens."""
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Whole sequences laid end to end: columns are [N], boundaries [S + 1]."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float64]
    weights: NDArray[np.float64]  # of each token's loss, from the whole step
    sequence_ids: NDArray[np.int64]  # index into this batch's sequences
    boundaries: NDArray[np.int64]  # sequence s is [boundaries[s], boundaries[s + 1])
    indices: tuple[int, ...]  # of the sequences, in the step's list

    @property
    def num_sequences(self) -> int:
        """Sequences in this micro-batch."""
        return len(self.indices)

    @property
    def active(self) -> int:
        """Trainable tokens in this micro-batch."""
        return int(np.count_nonzero(self.mask))

    @property
    def active_sequences(self) -> int:
        """Sequences with at least one trainable token."""
        return len(np.unique(self.sequence_ids[self.mask]))


def has_finite_logprobs(sequence: TrainSequence) -> bool:
    """Whether every trainable token has a usable rollout log-prob. If not.

    Leave the sequence out, and count it.
    """
    return bool(np.isfinite(sequence.rollout_logprobs[sequence.mask != 0]).all())


def pack_step(
    sequences: Sequence[TrainSequence],
    *,
    aggregation: str,
    max_tokens: int,
    constant_length: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> list[PackedBatch]:
    """Micro-batches of this rank for one optimizer step over `sequences` (the same list on every rank)."""
    active = [s.active for s in sequences]
    weights = sequence_weights(
        aggregation, active, [s.prompt for s in sequences], constant_length=constant_length
    )
    mine = shard([s.length for s in sequences], rank, world_size)
    cuts = cut_micro_batches([sequences[i].length for i in mine], max_tokens)
    return [pack(sequences, [mine[i] for i in cut], weights) for cut in cuts]


def shard(lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Indices of `rank`'s sequences, ascending: longest first to the rank with the fewest tokens, ties to the
    lower.

    Every sequence belongs to exactly one rank. A rank may get none.
    """
    if not 0 <= rank < world_size:
        raise ConfigError("rank must be in [0, world_size)", rank=rank, world_size=world_size)
    loads = [0] * world_size
    mine = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        owner = loads.index(min(loads))
        loads[owner] += lengths[index]
        if owner == rank:
            mine.append(index)
    return sorted(mine)


def cut_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Consecutive runs of sequences whose padded size, rows * longest, is at most `max_tokens`.

    The padded size bounds the packed size, too. A sequence longer than the bound is a micro-batch of its own.
    """
    if max_tokens < 1:
        raise ConfigError("max_tokens of a micro-batch must be at least 1", max_tokens=max_tokens)
    cuts: list[list[int]] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if not cuts or (len(cuts[-1]) + 1) * longest > max_tokens:
            cuts.append([])
            longest = length
        cuts[-1].append(index)
    return cuts


def pack(
    sequences: Sequence[TrainSequence], indices: Sequence[int], weights: NDArray[np.float64]
) -> PackedBatch:
    """Lay the sequences `indices` end to end. `weights` [len(sequences)] are the step's."""
    chosen = [sequences[i] for i in indices]
    lengths = np.array([s.length for s in chosen], dtype=np.int64)
    return PackedBatch(
        tokens=np.concatenate([s.tokens for s in chosen]).astype(np.int32, copy=False),
        mask=np.concatenate([s.mask for s in chosen]) != 0,
        rollout_logprobs=np.concatenate([s.rollout_logprobs for s in chosen]).astype(np.float32, copy=False),
        versions=np.concatenate([s.versions for s in chosen]).astype(np.int32, copy=False),
        advantages=np.repeat(np.array([s.advantage for s in chosen], dtype=np.float64), lengths),
        weights=np.repeat(weights[list(indices)], lengths),
        sequence_ids=np.repeat(np.arange(len(chosen), dtype=np.int64), lengths),
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        indices=tuple(indices),
    )
