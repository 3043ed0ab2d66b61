"""Rules 4 and 5, as in the table of one turn per version."""

from __future__ import annotations

import pytest

from schemas.errors import StalenessExceeded, TrajectoryVersionChanged
from schemas.span import check_span, check_unchanged, span_of


@pytest.mark.parametrize(
    ("turns", "limit", "refused_at"),
    [
        (["v1", "v2", "v1", "v2"], 1, None),
        (["v1", "v2", "v3"], 1, 2),
        (["v1", "-", "unknown", "-1", "v2"], 2, None),
        (["v1", "", "unknown", "-1", "v2"], 1, None),
        (["v1", "v2"], 0, 1),
        (["v1", "v1 ", " v1"], 0, None),
        (["v1", "v2", "v3", "v4"], None, None),
        ([], 0, None),
    ],
)
def test_turn_by_turn(turns: list[str], limit: int | None, refused_at: int | None) -> None:
    refused = None
    for index, version in enumerate(turns):
        try:
            check_span(turns[:index], [version], limit)
        except StalenessExceeded:
            refused = index
            break
    assert refused == refused_at


def test_the_refusal_says_what_the_agent_needs_to_know() -> None:
    with pytest.raises(StalenessExceeded) as caught:
        check_span(["v1", "v2"], ["v3"], 1, session_id="s", instance_id=None)
    assert caught.value.detail == {
        "versions": ["v1", "v2", "v3"],
        "version_span": 3,
        "version_switches": 2,
        "max_preempts": 1,
        "max_version_span": 2,
        "session_id": "s",
        "instance_id": None,
    }
    assert (caught.value.http_status, caught.value.code) == (502, "partial_rollout_staleness_exceeded")


def test_one_candidate_may_carry_several_versions() -> None:
    with pytest.raises(StalenessExceeded):
        check_span(["v1"], ["v2", "v3"], 1)
    assert check_span(["v1"], ["v1", "v2"], 1).versions == ("v1", "v2")


@pytest.mark.parametrize(
    ("versions", "span", "switches"), [([], 0, 0), (["-1"], 0, 0), (["a"], 1, 0), (["a", "b", "a"], 2, 1)]
)
def test_span_and_switches(versions: list[str], span: int, switches: int) -> None:
    facts = span_of(versions)
    assert (facts.version_span, facts.version_switches) == (span, switches)


@pytest.mark.parametrize(
    ("recorded", "current", "refused"),
    [
        (["v1"], "v2", True), (["v1"], " v1 ", False), (["v1"], "unknown", False), (["v1"], None, False),
        (["unknown"], "v2", False), ([], "v2", False), (["v1", "unknown"], "v2", True),
    ],
)  # fmt: skip
def test_non_partial_mode(recorded: list[str], current: str | None, refused: bool) -> None:
    if not refused:
        check_unchanged(recorded, current)
        return
    with pytest.raises(TrajectoryVersionChanged) as caught:
        check_unchanged(recorded, current, session_id="s")
    assert caught.value.detail == {"versions": ["v1"], "current_version": "v2", "session_id": "s"}
    assert caught.value.http_status == 502
