"""The trainer's own pace, from the log: how long it works on a step when it does not have to wait for its batch.

A step's work lasts from the later of its request and its batch to the request of the next step. Time spent waiting for a
batch is no part of it: slow rollouts would otherwise slow admission down, which slows rollouts down again.

The facts come from two topics, in any order and any number of times.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

LAST_STEPS = 8
_KEPT = 4 * LAST_STEPS


@dataclass(slots=True)
class TrainerPace:
    """Times per (branch, step), the newest few. All in microseconds."""

    _asked: dict[tuple[str, int], int] = field(default_factory=dict)
    _began: dict[tuple[str, int], int] = field(default_factory=dict)

    def asked(self, branch: str, step: int, at: int) -> None:
        """`BatchRequested`."""
        _note(self._asked, (branch, step), at)

    def began(self, branch: str, step: int, at: int) -> None:
        """`TrainBatch`, whose time is that of its cause."""
        _note(self._began, (branch, step), at)

    def step_us(self, branch: str) -> int | None:
        """Median work on one of the last steps of the branch; None: none was measured."""
        work = [
            self._asked[branch, step + 1] - max(began, self._asked[branch, step])
            for (of, step), began in self._began.items()
            if of == branch and (of, step) in self._asked and (of, step + 1) in self._asked
        ]
        return max(1, int(statistics.median(work[-LAST_STEPS:]))) if work else None


def _note(times: dict[tuple[str, int], int], key: tuple[str, int], at: int) -> None:
    if key in times:
        return
    times[key] = at
    if len(times) > _KEPT:
        del times[min(times, key=lambda known: known[1])]
