"""What the log says about group attempts, as far as a worker must know: which are closed, and which just became so.

Closed: completed or failed (`control.v1`), decided (`rollout.verdicts.v1`), or the run has ended. A prompt of a closed
attempt that is read again is not played again.
"""

from __future__ import annotations

from schemas.events import Event, GroupCompleted, GroupFailed, RunEnded, Verdict

Attempt = tuple[str, int]


class ClosedAttempts:
    """A fold over both topics of one run; the order between them does not matter. Idempotent."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed: set[Attempt] = set()
        self.run_ended = False

    def __contains__(self, attempt: Attempt) -> bool:
        return self.run_ended or attempt in self._closed

    def fold(self, event: Event) -> Attempt | None:
        """The attempt whose running trajectories are no longer wanted because of this event.

        Runs may share their topics, and the names of their groups: another run's events, its end too, say nothing.
        """
        if event.run_id != self._run_id:
            return None
        if isinstance(event, RunEnded):
            self.run_ended = True
            return None
        if not isinstance(event, GroupCompleted | GroupFailed | Verdict):
            return None
        attempt = (event.group_id, event.attempt)
        self._closed.add(attempt)
        unwanted = isinstance(event, GroupFailed) or (isinstance(event, Verdict) and event.outcome != "kept")
        return attempt if unwanted else None
