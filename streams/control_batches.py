"""Which pending groups make the next batch. Pure, over the state of the fold."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.window import WindowFacts
from streams.control_state import BatchChoice, ControlState, PendingGroup

Judged = tuple[PendingGroup, WindowFacts]


def weight(entry: PendingGroup, choice: BatchChoice) -> int:
    """What a group counts for in a batch."""
    return 1 if choice.by == "groups" else entry.group.sequences


def enough(state: ControlState, choice: BatchChoice) -> bool:
    """Whether what is pending would fill a batch."""
    have = len(state.pending) if choice.by == "groups" else state.pending_sequences
    return have >= choice.size


def fills(entries: Iterable[Judged], choice: BatchChoice) -> bool:
    """Whether these would."""
    return sum(weight(entry, choice) for entry, _ in entries) >= choice.size


def choose(state: ControlState, choice: BatchChoice) -> tuple[list[Judged], list[Judged]]:
    """As many pending groups as the batch takes, in the sampler's order (ties: completion order), judged once more; and those
    that were met on the way and are stale."""
    judge = state.window.judge
    waiting: Iterable[PendingGroup] = state.pending.values()
    if choice.sampler == "freshest_first":
        waiting = sorted(waiting, key=lambda e: (max(judge(e.versions).gaps, default=0), e.completed_offset))
    chosen: list[Judged] = []
    stale: list[Judged] = []
    have = 0
    for entry in waiting:
        facts = judge(entry.versions)
        if facts.stale:
            stale.append((entry, facts))
            continue
        chosen.append((entry, facts))
        have += weight(entry, choice)
        if have >= choice.size:
            break
    return chosen, stale
