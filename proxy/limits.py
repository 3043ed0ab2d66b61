"""How much the proxy takes on: requests in flight and open sessions. Beyond that, 429 with Retry-After, at once and for free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import Overloaded
from schemas.settings import ProxySettings


class Limits:
    """`inflight`: requests between their body and their answer."""

    def __init__(self, settings: ProxySettings) -> None:
        self.inflight = 0
        self.max_body_bytes = settings.max_body_bytes
        self._max_inflight = settings.max_inflight
        self._max_sessions = settings.max_sessions
        self._max_session_inflight = settings.max_session_inflight

    @contextmanager
    def request(self) -> Iterator[None]:
        """One place for a generation. Overloaded if there is none."""
        if self.inflight >= self._max_inflight:
            raise Overloaded(
                "too many requests are in flight", limit="proxy.max_inflight", maximum=self._max_inflight
            )
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1

    def check_session(self, busy: int) -> None:
        """Overloaded if one more request of a session, of which so many generate or record, would be too many."""
        if busy >= self._max_session_inflight:
            raise Overloaded(
                "too many requests of the session are in flight",
                limit="proxy.max_session_inflight",
                maximum=self._max_session_inflight,
            )

    def check_sessions(self, open_sessions: int) -> None:
        """Overloaded if another session would be too many."""
        if open_sessions >= self._max_sessions:
            raise Overloaded(
                "too many sessions are open",
                limit="proxy.max_sessions",
                maximum=self._max_sessions,
                retry_after_s=5.0,
            )
