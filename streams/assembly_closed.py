"""Attempts that are closed: their events may be read again, and must change nothing.

An end closes its own attempt: whoever opens a session may name any attempt, and an end of one that nobody admitted must not
close those before it. A verdict closes those before its attempt, too, because attempts are admitted in order. Kept as intervals
of prompts, so that memory follows what is open and not the length of the run. Filled from the terminal events in `control.v1`
and from the verdicts; other threads may add.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from schemas import events as ev
from schemas.index_set import GroupSet

_REMEMBERED = 4096


class Attempt(NamedTuple):
    """One attempt of one group."""

    group_id: str
    attempt: int


class ClosedAttempts:
    """`run_id`: of the groups that are known by pass and prompt; others are known by name."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._ended: dict[int, GroupSet] = {}
        self._decided: dict[int, GroupSet] = {}
        self._newest: deque[Attempt] = deque(maxlen=_REMEMBERED)
        self._added = 0
        # who looks meanwhile needs none: an addition changes a set at one stroke
        self._adding = threading.Lock()

    def add(self, attempt: Attempt) -> None:
        """This attempt is closed."""
        self._add(self._ended, attempt)

    def decide(self, attempt: Attempt) -> None:
        """This attempt and those before it are closed."""
        self._add(self._decided, attempt)

    def _add(self, by_attempt: dict[int, GroupSet], attempt: Attempt) -> None:
        with self._adding:
            groups = by_attempt.get(attempt.attempt)
            if groups is None:
                groups = by_attempt[attempt.attempt] = GroupSet(self._run_id)
            groups.add(attempt.group_id)
            self._newest.append(attempt)
            self._added += 1

    def since(self, seen: int) -> tuple[int, list[Attempt] | None]:
        """How many were added up to now, and those that were behind the first `seen`; None: they are too many to be told."""
        with self._adding:
            count = self._added - seen
            if count > len(self._newest):
                return self._added, None
            return self._added, list(self._newest)[len(self._newest) - count :]

    def learn(self, event: ev.Event) -> None:
        """From a record of `control.v1` or of the verdicts; another run may have groups of the same names."""
        if event.run_id != self._run_id:
            return
        if isinstance(event, ev.Verdict):
            self.decide(Attempt(event.group_id, event.attempt))
        elif isinstance(event, ev.GroupCompleted | ev.GroupFailed):
            self.add(Attempt(event.group_id, event.attempt))

    def __contains__(self, attempt: Attempt) -> bool:
        group, number = attempt
        ended = self._ended.get(number)
        if ended is not None and group in ended:
            return True
        for decided, groups in tuple(self._decided.items()):  # noqa: SIM110 — asked of every record: a generator costs more
            if decided >= number and group in groups:
                return True
        return False
