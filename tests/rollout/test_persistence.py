from __future__ import annotations

import pytest

from rollout.persistence import (
    AttemptClosed,
    CallFailed,
    Meaning,
    Persistence,
    ProxyAway,
    TrajectoryRefused,
    meaning,
)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (0, "no_connection", "again"),
        (404, "unknown_session", "again"),
        (429, "overloaded", "again"),
        (503, "publish_timeout", "again"),
        (504, "engine_timeout", "again"),
        (409, "session_conflict", "again"),
        (409, "trajectory_closed", "refused"),
        (502, "partial_rollout_staleness_exceeded", "refused"),
        (502, "trajectory_version_changed", "refused"),
        (410, "trajectory_gone", "closed"),
        (400, "invalid_request", "wrong"),
        (401, "unauthorized", "wrong"),
        (413, "context_overflow", "wrong"),
        (500, "hoofprint_error", "wrong"),
    ],
)
def test_what_a_status_means(status: int, code: str, expected: Meaning) -> None:
    assert meaning(status, code) == expected


class Script:
    """Fails with these in turn, then answers."""

    def __init__(self, *failures: CallFailed) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "answer"


class Sleep:
    def __init__(self) -> None:
        self.naps: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.naps.append(seconds)


async def test_the_same_call_is_made_again_until_it_is_answered() -> None:
    sleep = Sleep()
    call = Script(
        CallFailed(0, "", "refused"), CallFailed(404, "unknown_session", "?"), CallFailed(503, "", "?")
    )
    assert await Persistence(10.0, sleep)(call) == "answer"
    assert sleep.naps == [0.1, 0.2, 0.4]


async def test_retry_after_sets_the_wait() -> None:
    sleep = Sleep()
    assert await Persistence(10.0, sleep)(Script(CallFailed(429, "overloaded", "?", 1.5))) == "answer"
    assert sleep.naps == [1.5]


async def test_patience_ends() -> None:
    sleep = Sleep()
    call = Script(*[CallFailed(0, "no_connection", "refused")] * 100)
    with pytest.raises(ProxyAway) as away:
        await Persistence(5.0, sleep)(call)
    assert sum(sleep.naps) >= 5.0
    assert away.value.detail["code"] == "no_connection"


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (CallFailed(410, "trajectory_gone", "closed"), AttemptClosed),
        (CallFailed(409, "trajectory_closed", "finalized"), TrajectoryRefused),
        (CallFailed(400, "invalid_request", "no"), CallFailed),
    ],
)
async def test_what_repeating_cannot_mend_is_raised_at_once(
    failure: CallFailed, error: type[Exception]
) -> None:
    call = Script(failure)
    with pytest.raises(error):
        await Persistence(5.0, Sleep())(call)
    assert call.calls == 1
