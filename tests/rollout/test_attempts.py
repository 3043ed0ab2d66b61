from __future__ import annotations

import itertools
from typing import Any

import pytest

from rollout.attempts import ClosedAttempts
from schemas.events import Event, GroupCompleted, GroupFailed, PayloadRef, RunEnded, Verdict

BASE: dict[str, Any] = {"run_id": "r", "occurred_at": 1}
GROUP: dict[str, Any] = {**BASE, "group_id": "g", "attempt": 0}


def verdict(outcome: Any) -> Verdict:
    return Verdict(**GROUP, cause_offset=1, index=0, outcome=outcome, reason="r")


COMPLETED = GroupCompleted(
    **GROUP, payload=PayloadRef("u", "s", 1, "c"), sequences=1, trainable_tokens=1, trajectories=()
)
FAILED = GroupFailed(**GROUP, reason="timeout")


@pytest.mark.parametrize(
    ("event", "unwanted"),
    [
        (COMPLETED, None),
        (FAILED, ("g", 0)),
        (verdict("kept"), None),
        (verdict("dropped"), ("g", 0)),
        (verdict("retry"), ("g", 0)),
    ],
)
def test_what_closes_an_attempt_and_what_stops_it(event: Event, unwanted: tuple[str, int] | None) -> None:
    closed = ClosedAttempts()
    assert closed.fold(event) == unwanted
    assert ("g", 0) in closed
    assert ("g", 1) not in closed


def test_the_order_does_not_matter() -> None:
    for order in itertools.permutations([COMPLETED, FAILED, verdict("retry")]):
        closed = ClosedAttempts()
        for event in [*order, *order]:
            closed.fold(event)
        assert ("g", 0) in closed
        assert ("g", 1) not in closed


def test_the_end_of_the_run_closes_everything() -> None:
    closed = ClosedAttempts()
    closed.fold(RunEnded(**BASE, reason="done"))
    assert ("other", 3) in closed
