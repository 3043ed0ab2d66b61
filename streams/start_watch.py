"""Attempts that were requested and that nobody started: the feeder ends them, so that they cannot hold a place for ever.

An attempt is judged once, `start_timeout_s` after it was requested: the segments topic shows an event of a session of it, or
it fails with `not_started`. A start that comes later finds its attempt closed. What a feeder finds open when it starts has
its whole time again: workers were perhaps away as long as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas import events as ev
from schemas.events import identified
from streams.admission import AdmissionState
from streams.assembly_closed import Attempt
from streams.segment_look import AttemptLook


class StartWatch:
    """`begun_at`: when this feeder began to request, UTC microseconds."""

    def __init__(self, run_id: str, timeout_s: float, look: AttemptLook, begun_at: int) -> None:
        self._run_id, self._timeout_us, self._look = run_id, int(timeout_s * 1_000_000), look
        self._begun_at = begun_at
        self._started: set[Attempt] = set()

    def failures(self, state: AdmissionState, now_us: int) -> Iterator[ev.GroupFailed]:
        """Attempts whose time is over and of which the log shows nothing."""
        running = {
            Attempt(name, group.attempt): group
            for name, group in state.open_groups.items()
            if group.running and name not in state.retries
        }
        self._started &= running.keys()
        late = {
            attempt: group.admitted_at
            for attempt, group in running.items()
            if attempt not in self._started
            and max(group.admitted_at, self._begun_at) + self._timeout_us <= now_us
        }
        if not late:
            return
        self._started |= self._look.started(late)
        for attempt in late.keys() - self._started:
            yield identified(
                ev.GroupFailed(
                    run_id=self._run_id,
                    occurred_at=now_us,
                    group_id=attempt.group_id,
                    attempt=attempt.attempt,
                    reason="not_started",
                    detail=f"no session within {self._timeout_us / 1_000_000:g} s of its request",
                )
            )
