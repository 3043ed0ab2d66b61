"""What a proxy keeps of the control log: versions in their order, and closed attempts in little room."""

from __future__ import annotations

import pytest

from proxy.control_view import ControlView, checkpoint_path
from schemas.events import Event, PolicyPublished, Verdict
from schemas.ids import group_id

RUN = "run"


def viewed(*events: Event) -> tuple[ControlView, list[tuple[str, int]]]:
    told: list[tuple[str, int]] = []
    view = ControlView(RUN, lambda group, attempt: told.append((group, attempt)))
    for event in events:
        view.fold(event)
    return view, told


def verdict(group: str, attempt: int, outcome: str, run: str = RUN) -> Verdict:
    return Verdict(
        run_id=run, occurred_at=1, cause_offset=0, index=0, group_id=group, attempt=attempt,
        outcome=outcome, reason="stale",
    )  # fmt: skip


def published(version: str, uri: str | None) -> PolicyPublished:
    return PolicyPublished(run_id=RUN, occurred_at=1, version=version, checkpoint_uri=uri)


def test_an_attempt_is_closed_by_its_retry_or_drop_and_by_no_other() -> None:
    one, other, odd = group_id(RUN, 0, 1), group_id(RUN, 0, 2), "named by somebody"
    view, told = viewed(
        verdict(one, 0, "retry"), verdict(other, 0, "kept"), verdict(odd, 1, "dropped"),
        verdict(other, 1, "dropped", run="another"),
    )  # fmt: skip
    asked = [(one, 0), (one, 1), (other, 0), (other, 1), (odd, 0), (odd, 1), (None, 0), (one, None)]
    assert [view.is_closed(*a) for a in asked] == [True, False, False, False, False, True, False, False]
    assert told == [(one, 0), (odd, 1)]


def test_a_long_run_s_closed_attempts_take_the_room_of_its_gaps() -> None:
    view, _ = viewed(*(verdict(group_id(RUN, 0, i), 0, "dropped") for i in range(5_000) if i != 1_234))
    assert view.closed[0].passes[0].bounds == [0, 1_234, 1_235, 5_000]
    assert view.closed[0].others == {}
    assert not view.is_closed(group_id(RUN, 0, 1_234), 0)


def test_the_first_publication_of_a_label_counts_and_the_newest_is_the_last() -> None:
    view, _ = viewed(published("a", "/a"), published("b", "file:///b"), published("a", "/other"))
    assert view.published == {"a": "/a", "b": "/b"}
    assert view.newest() == ("b", "/b")
    assert view.newest({"b"}) == ("a", "/a")
    assert view.newest({"a", "b"}) is None
    assert (view.is_newer("b", "a"), view.is_newer("a", "b"), view.is_newer("x", "a")) == (True, False, False)


def test_an_outer_trainer_s_newest_label_hides_older_checkpoints() -> None:
    view, _ = viewed(published("a", "/a"), published("outer", None))
    assert view.newest() == ("outer", None)


@pytest.mark.parametrize(
    ("uri", "path"), [("/a/b", "/a/b"), ("file:///a/b", "/a/b"), ("s3://bucket/b", "s3://bucket/b")]
)
def test_checkpoints_are_paths_or_urls_of_other_schemes(uri: str, path: str) -> None:
    assert checkpoint_path(uri) == path
