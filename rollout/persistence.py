"""Which failed calls to the proxy are made again, and for how long.

A proxy that restarts refuses connections, answers 503, or does not know the session yet (404); the session's token lets
it recover, so the same request is sent again. 410 means that the attempt was closed. 409 and 502 mean that the
trajectory has its end already. Everything else is the caller's mistake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from schemas.errors import HoofprintError, RolloutError, SessionConflict, TrajectoryGone, UpstreamError

T = TypeVar("T")
Meaning = Literal["again", "closed", "refused", "wrong"]

NO_CONNECTION = 0
_AGAIN = frozenset({NO_CONNECTION, 404, 429, 503, 504})
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 3.0


class AttemptClosed(TrajectoryGone):
    """The group attempt was decided (410): nothing more of it is wanted."""

    code = "attempt_closed"


class TrajectoryRefused(RolloutError):
    """The proxy has ended this trajectory (rules 4 and 5), or it was finalized before."""

    code = "trajectory_refused"
    http_status = 409


class ProxyAway(UpstreamError):
    """The proxy could not serve the call for longer than the caller's patience."""

    code = "proxy_away"


class CallFailed(HoofprintError):
    """One call failed. `status` 0: there was no answer."""

    code = "call_failed"

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, status=status, code=code)
        self.status = status
        self.reply_code = code
        self.retry_after_s = retry_after_s


def meaning(status: int, code: str) -> Meaning:
    """What a failed call means for the trajectory."""
    if status in _AGAIN or (status == SessionConflict.http_status and code == SessionConflict.code):
        return "again"  # a conflict: the call that our lost connection left behind is still being cancelled
    if status == TrajectoryGone.http_status:
        return "closed"
    return "refused" if status in (409, 502) else "wrong"


class Persistence:
    """Makes a call until it is answered. `patience_s` counts from the first failure; `sleep` comes from outside."""

    def __init__(self, patience_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._patience_s = patience_s
        self._sleep = sleep

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's result. AttemptClosed, TrajectoryRefused, ProxyAway, or the CallFailed that repeating cannot mend."""
        waited, wait = 0.0, _FIRST_WAIT_S
        while True:
            try:
                return await call()
            except CallFailed as failed:
                _raise_final(failed)
                if waited >= self._patience_s:
                    raise ProxyAway(
                        f"the proxy did not serve the call for {waited:.0f} s: {failed.message}",
                        **failed.detail,
                    ) from failed
                pause = min(wait if failed.retry_after_s is None else failed.retry_after_s, _LONGEST_WAIT_S)
            await self._sleep(pause)
            waited += pause
            wait = min(2 * wait, _LONGEST_WAIT_S)


def _raise_final(failed: CallFailed) -> None:
    match meaning(failed.status, failed.reply_code):
        case "closed":
            raise AttemptClosed(failed.message, **failed.detail) from failed
        case "refused":
            raise TrajectoryRefused(failed.message, **failed.detail) from failed
        case "wrong":
            raise failed
        case "again":
            return
