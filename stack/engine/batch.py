"""The running requests as rows: numpy columns that a decode step reads whole, and their slots in the
key-value cache.

Row i lives in cache slot i. A row that ends is replaced by the last one, so rows stay 0..n-1 without holes.
Invariant: `length[i]` tokens of row i are in the cache, and `last[i]` is the sampled token that is not
there yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stack.engine.generation import Generation
from stack.engine.kvcache import KVCache
from stack.engine.model import CausalLM
from stack.engine.sampling import adjust, draw, uniforms


class Batch:
    """At most `capacity` running generations and their cache."""

    def __init__(self, model: CausalLM, capacity: int) -> None:
        self.cache = KVCache(model.spec)
        self.capacity = capacity
        self.rows: list[Generation] = []
        self.last = np.zeros(capacity, np.int64)
        self.length = np.zeros(capacity, np.int64)
        self._seed = np.zeros(capacity, np.uint64)
        self._temperature = np.ones(capacity, np.float32)
        self._greedy = np.zeros(capacity, np.bool_)
        self._top_k = np.zeros(capacity, np.int64)
        self._top_p = np.ones(capacity, np.float64)
        self._min_p = np.zeros(capacity, np.float32)
        self._special = 0

    def __len__(self) -> int:
        return len(self.rows)

    def reserve(self, rows: int, positions: int) -> None:
        """Make room in the cache for `rows` rows of `positions`."""
        used = int(self.length[: len(self.rows)].max(initial=0))
        self.cache.reserve(rows, positions, used_slots=len(self.rows), used_positions=used)

    def add(self, generation: Generation, length: int) -> None:
        """Append a row whose first `length` positions are already in the cache slot `len(self)`."""
        row, sampling = len(self.rows), generation.sampling
        self.rows.append(generation)
        self.length[row] = length
        self._seed[row] = generation.seed
        self._greedy[row] = sampling.greedy
        self._temperature[row] = 1.0 if sampling.temperature == 0.0 else sampling.temperature
        self._top_k[row], self._top_p[row], self._min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p
        self._special += _is_special(generation)

    def remove(self, row: int) -> Generation:
        """Take a row out; the last row takes its place."""
        generation = self.rows[row]
        self._special -= _is_special(generation)
        if generation.experts_start is not None:
            generation.routes = self.cache.routes(row, int(self.length[row]))
        tail = len(self.rows) - 1
        if row != tail:
            self.cache.move(tail, row, int(self.length[tail]))
            self.rows[row] = self.rows[tail]
            for column in self._columns():
                column[row] = column[tail]
        self.rows.pop()
        return generation

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return (
            self.last, self.length, self._seed, self._temperature, self._greedy,
            self._top_k, self._top_p, self._min_p,
        )  # fmt: skip

    def sample(self, logits: Tensor, first: int) -> None:
        """Draw the next token of rows `first..` from `logits` (N, V) and append it to their generations."""
        rows = slice(first, first + len(logits))
        chosen = self.rows[rows]
        special = self._special > 0
        for index, generation in enumerate(chosen if special else ()):
            if generation.sampling.adjusts:
                adjust(logits[index], generation.sampling, generation.output_ids, generation.end_ids)
        tops = max((g.top_logprobs for g in chosen), default=0) if special else 0
        greedy = self._greedy[rows]
        drawn = draw(
            logits,
            torch.from_numpy(self._temperature[rows]),
            torch.from_numpy(uniforms(self._seed[rows], self.length[rows])),
            greedy=torch.from_numpy(greedy) if greedy.any() else None,
            truncation=self._truncation(rows)
            if special and any(g.sampling.truncates for g in chosen)
            else None,
            with_distribution=tops > 0,
        )
        self.last[rows] = drawn.tokens.numpy()
        for generation, token, logprob in zip(
            chosen, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True
        ):
            generation.append(token, logprob)
        if drawn.distribution is not None:
            values, ids = drawn.distribution.topk(tops, -1)
            for generation, row_values, row_ids in zip(chosen, values.tolist(), ids.tolist(), strict=True):
                n = generation.top_logprobs
                generation.tops.append(list(zip(row_values[:n], row_ids[:n], strict=True)))

    def _truncation(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.from_numpy(self._top_k[rows]),
            torch.from_numpy(self._top_p[rows]),
            torch.from_numpy(self._min_p[rows]),
        )

    def decode(self, model: CausalLM) -> None:
        """One token for every row."""
        n = len(self.rows)
        width = int(self.length[:n].max()) + 1
        self.reserve(n, width)
        tokens = torch.from_numpy(self.last[:n])[:, None]
        hidden = model.forward(tokens, torch.from_numpy(self.length[:n]), width, self.cache, 0)
        self.length[:n] += 1
        self.sample(model.logits(hidden[:, 0]), 0)


def _is_special(generation: Generation) -> bool:
    """Whether the row needs more than temperature sampling: only then are rows looked at one by one."""
    sampling = generation.sampling
    return bool(sampling.truncates or sampling.adjusts or generation.top_logprobs)
