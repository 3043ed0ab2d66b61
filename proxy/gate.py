"""The one gate before the engines: closed for a weight update or a pause, it holds what wants to start or resume.

An engine cannot abort requests that wait behind its own pause, so nothing is sent to a paused engine. Several reasons may
hold the gate at a time (an update inside a pause); it is open when none is left. A pause of one session holds only that, and
ends with it, or when another proxy has claimed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable


class Gate:
    """`waiting`: how many generations it holds now."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._sessions: set[str] = set()
        self._waiters: list[tuple[str, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Generations that are held."""
        return len(self._waiters)

    @property
    def reasons(self) -> Iterable[str]:
        """Why it is closed; empty when it is open."""
        return sorted(self._reasons)

    @property
    def sessions(self) -> list[str]:
        """Sessions that are paused on their own."""
        return sorted(self._sessions)

    def is_open(self, session_id: str) -> bool:
        """Whether a generation of this session may go to an engine."""
        return not self._reasons and session_id not in self._sessions

    def close(self, reason: str) -> None:
        """Hold everything."""
        self._reasons.add(reason)

    def open(self, reason: str) -> None:
        """Take back one reason; lets go what nothing holds any more."""
        self._reasons.discard(reason)
        self._let_go()

    def close_session(self, session_id: str) -> None:
        """Hold one session."""
        self._sessions.add(session_id)

    def open_session(self, session_id: str) -> None:
        """Let one session go on; also when it has ended, so that no name outlives its session."""
        self._sessions.discard(session_id)
        self._let_go()

    def keep_sessions(self, known: Container[str]) -> None:
        """Let go every paused session that nobody knows any more."""
        self._sessions = {session_id for session_id in self._sessions if session_id in known}
        self._let_go()

    async def enter(self, session_id: str) -> None:
        """Return when the session may go on; cancelling leaves nothing behind."""
        while not self.is_open(session_id):
            place = (session_id, asyncio.get_running_loop().create_future())
            self._waiters.append(place)
            try:
                await place[1]
            finally:
                if place in self._waiters:
                    self._waiters.remove(place)

    def _let_go(self) -> None:
        held: list[tuple[str, asyncio.Future[None]]] = []
        for session_id, future in self._waiters:
            if not self.is_open(session_id):
                held.append((session_id, future))
            elif not future.done():
                future.set_result(None)
        self._waiters = held
