"""Attempts that are closed: their events may be read again, and must change nothing.

Attempts of a group are closed in order (the next one is admitted because the last one ended), so one number per group
says it all. Filled from the terminal events in `control.v1` and from the verdicts; other threads may add.
"""

from __future__ import annotations

from typing import NamedTuple

from schemas import events as ev


class Attempt(NamedTuple):
    """One attempt of one group."""

    group_id: str
    attempt: int


class ClosedAttempts:
    """Highest closed attempt of every group."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def add(self, attempt: Attempt) -> None:
        """This attempt and those before it are closed."""
        if attempt not in self:
            self._highest[attempt.group_id] = attempt.attempt

    def learn(self, event: ev.Event) -> None:
        """From a record of `control.v1` or of the verdicts."""
        if isinstance(event, ev.GroupCompleted | ev.GroupFailed | ev.Verdict):
            self.add(Attempt(event.group_id, event.attempt))

    def __contains__(self, attempt: Attempt) -> bool:
        return self._highest.get(attempt.group_id, -1) >= attempt.attempt

    def __len__(self) -> int:
        return len(self._highest)
