"""What the trainer asks of a backend, and the settings and results that cross that line.

Invariants:
* A step is deterministic: the same weights, optimizer state, micro-batches and loss give the same `digest()`,
  bit for bit, on the same machine and thread count.
* `save` and `export` are atomic: the directory is there whole, or not at all.
* After `load`, training goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainer.losses.contract import Loss
from trainer.packing import PackedBatch


class OptimizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adam with linear warm-up to a constant rate. `weight_decay` is decoupled (AdamW)."""

    learning_rate: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 5
    max_grad_norm: float = 1.0

    def rate(self, updates: int) -> float:
        """Learning rate of the update after `updates` earlier ones.

        The first is learning_rate / warmup_steps.
        """
        return self.learning_rate * min(1.0, (updates + 1) / max(self.warmup_steps, 1))


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Facts per packed token [N] of one micro-batch under the weights before the update; 0 where masked."""

    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    clipped: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one optimizer step, and the token facts in the order of its micro-batches."""

    metrics: dict[str, float]
    facts: list[TokenFacts]


class Backend(Protocol):
    """A policy that can be scored, trained, saved and exported."""

    def score(self, batch: PackedBatch) -> NDArray[np.float32]:
        """Log-prob of every trainable token [N] under the present weights, 0 elsewhere. No gradient."""
        ...

    def train_step(
        self, micro_batches: Sequence[PackedBatch], loss: Loss, *, entropy_bonus: float = 0.0
    ) -> StepResult:
        """One optimizer update from all micro-batches of a step."""
        ...

    def digest(self) -> str:
        """sha256 over all parameters: sorted names and raw bytes."""
        ...

    def save(self, path: Path, meta: Mapping[str, object]) -> None:
        """Durable checkpoint at `path` with the caller's `meta` (JSON-ready)."""
        ...

    def load(self, path: Path) -> dict[str, object]:
        """Continue from the checkpoint at `path`; its meta."""
        ...

    def export(self, path: Path) -> None:
        """A standard Hugging Face checkpoint directory of the present weights at `path`."""
        ...
