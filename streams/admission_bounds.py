"""How many new groups may be admitted now: bounds over the facts of `AdmissionState`. Pure.

All modes: admitted groups without a terminal verdict stay within `max_outstanding_groups`. With `eta`, groups that went or
may still go into training are at most (eta + v + 1) * B after v trained steps; dropped ones count no longer, and
`oversample` lets so many times more groups run as are expected to survive the filters.

`staleness.mode`:
* `drop`: nothing more; what leaves the window is dropped.
* `wait`: a group is admitted only if no open group can leave the window by being trained late, whatever the order in which
  they complete. With N versions kept, o the oldest version that an open group may hold and e the newest version once the
  emitted batches are trained: the open groups, the new one included, fill at most N - e + o batches, because each batch
  trained before a group costs it one version. That is the bound above with eta = N - 1 and the oldest open group's version
  in the place of v: one slow group holds admission back until it ends. Nothing is stale then unless versions come from
  elsewhere than from batches (a rollback, an outer trainer). Batches are counted in groups: how many sequences a running
  group gives, nobody knows before it ends, so the settings refuse `wait` with `batch.by = sequences`.
* `pace`: as many new groups per second as the trainer takes when it need not wait, times the share that the filters and the
  window have left so far, and none while a whole batch waits in the queue. Until a step is measured: two batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from schemas.settings import Settings
from streams.admission import AdmissionState, OpenGroup

_UNMEASURED_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the bounds. `batch_size` counts groups, or sequences of groups of `group_size` trajectories."""

    max_outstanding_groups: int
    batch_size: int
    by: Literal["groups", "sequences"] = "groups"
    group_size: int = 8
    eta: int | None = None
    mode: Literal["drop", "wait", "pace"] = "drop"
    keep_versions: int = 0
    oversample: float = 1.0

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """From the run's settings tree."""
        feeder, batch = settings.feeder, settings.batch
        return cls(
            feeder.max_outstanding_groups, batch.size, batch.by, settings.group.size, feeder.eta,
            settings.staleness.mode, settings.window.keep_versions, feeder.oversample,
        )  # fmt: skip

    @property
    def group_weight(self) -> int:
        """What a group is expected to count for in a batch: one sequence per trajectory."""
        return 1 if self.by == "groups" else self.group_size

    @property
    def batch_groups(self) -> int:
        """Groups of one optimizer step."""
        return -(-self.batch_size // self.group_weight)

    def weight(self, group: OpenGroup) -> int:
        """The same of a group that may be complete: then its sequences are known."""
        return self.group_weight if self.by == "groups" or group.running else group.sequences


def free_places(state: AdmissionState, limits: Limits, now_us: int) -> int:
    """How many new groups may be admitted now."""
    free = limits.max_outstanding_groups - len(state.open_groups)
    if limits.eta is not None:
        free = min(free, _within_eta(state, limits, limits.eta))
    if limits.mode == "wait":
        free = min(free, _within_window(state, limits))
    elif limits.mode == "pace":
        free = min(free, _at_pace(state, limits, now_us))
    return free if free > 0 else int(_starves(state, limits))


def _within_eta(state: AdmissionState, limits: Limits, eta: int) -> int:
    complete = sum(not group.running for group in state.open_groups.values())
    bound = (eta + state.trained_steps + 1) * limits.batch_groups
    survivors = bound - state.kept_groups - complete
    return math.floor(survivors * limits.oversample) - (len(state.open_groups) - complete)


def _within_window(state: AdmissionState, limits: Limits) -> int:
    # an attempt that is told to retry starts anew, at the version that engines have by then
    running = [group.ordinal for name, group in state.open_groups.items() if name not in state.retries]
    oldest = min([state.active_ordinal, *running])
    batches = limits.keep_versions - state.coming_ordinal + oldest
    return batches * limits.batch_size - len(state.open_groups)


def _at_pace(state: AdmissionState, limits: Limits, now_us: int) -> int:
    waiting = sum(limits.weight(group) for group in state.open_groups.values() if not group.running)
    if waiting >= limits.batch_size:
        return 0
    step_us = state.pace.step_us(state.branch)
    if step_us is None:
        return math.floor(_UNMEASURED_BATCHES * limits.batch_groups * limits.oversample) - len(
            state.open_groups
        )
    ended = state.kept_groups + state.dropped_groups
    per_step = limits.batch_groups * (ended / state.kept_groups if state.kept_groups else limits.oversample)
    interval = step_us / per_step
    due_at = 0.0
    for at in state.new_at:  # whoever comes early is owed for; who comes late may catch up on one batch
        due_at = max(due_at, at - limits.batch_groups * interval) + interval
    return min(limits.batch_groups, max(0, math.floor((now_us - due_at) / interval) + 1))


def _starves(state: AdmissionState, limits: Limits) -> bool:
    """A request is open, nothing runs, and what is complete does not fill the batch: bounds that count what is expected
    (sequences per group, survivors of a filter) would otherwise hold the run for ever."""
    groups = state.open_groups.values()
    if state.open_request is None or state.retries or any(group.running for group in groups):
        return False
    return sum(map(limits.weight, groups)) < limits.batch_size
