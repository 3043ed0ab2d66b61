from __future__ import annotations

import itertools
from typing import Any

import pytest

from rollout.attempts import ClosedAttempts
from schemas.events import Event, GroupCompleted, GroupFailed, PayloadRef, RunEnded, Verdict

RUN = "r"
BASE: dict[str, Any] = {"run_id": RUN, "occurred_at": 1}
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
    closed = ClosedAttempts(RUN)
    assert closed.fold(event) == unwanted
    assert ("g", 0) in closed
    assert ("g", 1) not in closed


def test_the_order_does_not_matter() -> None:
    for order in itertools.permutations([COMPLETED, FAILED, verdict("retry")]):
        closed = ClosedAttempts(RUN)
        for event in [*order, *order]:
            closed.fold(event)
        assert ("g", 0) in closed
        assert ("g", 1) not in closed


def test_the_end_of_the_run_closes_everything() -> None:
    closed = ClosedAttempts(RUN)
    closed.fold(RunEnded(**BASE, reason="done"))
    assert ("other", 3) in closed


@pytest.mark.parametrize("event", [COMPLETED, FAILED, verdict("dropped"), RunEnded(**BASE, reason="done")])
def test_another_run_in_the_same_topics_closes_nothing_of_ours(event: Event) -> None:
    closed = ClosedAttempts("ours")
    assert closed.fold(event) is None
    assert ("g", 0) not in closed
