"""Key-value cache of fixed slots, grown on demand.

Running requests always occupy slots 0..n-1, so a decode step works on views and copies nothing. When a
request ends, the last row moves into its slot. The price is padding: a step attends over the longest
running context for every row. Invariant: positions at and above a row's length hold garbage, which the
attention mask hides until it is overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stack.engine.checkpoint import ModelSpec


class KVCache:
    """One tensor (layers, 2, slots, kv_heads, positions, head_dim); the 2 are keys and values.

    A model with experts has one more head: in it, every position's experts stand with its keys (see `experts`).
    """

    def __init__(self, spec: ModelSpec, *, slots: int = 8, positions: int = 128) -> None:
        self._spec = spec
        self.data = self._allocate(slots, positions)

    def _allocate(self, slots: int, positions: int) -> Tensor:
        spec = self._spec
        heads = spec.kv_heads + (1 if spec.experts else 0)
        return torch.zeros(spec.layers, 2, slots, heads, positions, spec.head_dim)

    @property
    def slots(self) -> int:
        return int(self.data.shape[2])

    @property
    def positions(self) -> int:
        return int(self.data.shape[4])

    def reserve(self, slots: int, positions: int, *, used_slots: int, used_positions: int) -> None:
        """Grow (by doubling) until `slots` rows of `positions` fit, keeping the used corner."""
        if slots <= self.slots and positions <= self.positions:
            return
        new_slots, new_positions = self.slots, self.positions
        while new_slots < slots:
            new_slots *= 2
        while new_positions < positions:
            new_positions *= 2
        old = self.data
        self.data = self._allocate(new_slots, new_positions)
        keep = (slice(None), slice(None), slice(used_slots), slice(None), slice(used_positions))
        self.data[keep] = old[keep]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def read(self, slot: int, length: int) -> Tensor:
        """An independent copy of a slot's first positions: (layers, 2, kv_heads, length, head_dim)."""
        return self.data[:, :, slot, :, :length].clone()

    def routes(self, slot: int, length: int) -> Tensor:
        """Experts of a slot's first positions: an independent copy, (length, layers, top_k)."""
        found = self.data[:, 0, slot, self._spec.kv_heads, :length, : self._spec.experts_per_token]
        return found.to(torch.int32).transpose(0, 1).contiguous()

    def write(self, slot: int, prefix: Tensor) -> None:
        """Put what `read` returned at the start of a slot."""
        self.data[:, :, slot, :, : prefix.shape[3]] = prefix
