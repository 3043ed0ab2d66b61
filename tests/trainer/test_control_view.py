"""The trainer's fold of the log: ranks of versions, the surviving history, one batch per step."""

from __future__ import annotations

import hand_made
import pytest

from schemas.errors import InvariantBroken
from schemas.events import (
    BatchRequested,
    EndOfBatches,
    Event,
    PolicyActivated,
    PolicyPublished,
    RolledBack,
    StepCompleted,
)
from trainer.control_view import ControlView, version_label

RUN = "run"


def published(version: str, run_id: str = RUN, policy_id: str = "main") -> PolicyPublished:
    return PolicyPublished(run_id=run_id, policy_id=policy_id, occurred_at=0, version=version)


def completed(step: int, branch: str = "", digest: str = "d") -> StepCompleted:
    return StepCompleted(
        run_id=RUN,
        occurred_at=0,
        step=step,
        branch=branch,
        batch_id="b",
        digest=digest,
        checkpoint_step=0,
        metrics={},
    )


def rolled_back(to_step: int, branch: str) -> RolledBack:
    return RolledBack(run_id=RUN, occurred_at=0, to_step=to_step, branch=branch, reason="differs")


def view_of(*events: Event) -> ControlView:
    view = ControlView(RUN)
    for event in events:
        view.apply(event)
    return view


def test_ordinal_is_the_rank_of_the_first_publication() -> None:
    view = view_of(published("v000000"), published("other"), published("v000000"), published("v000001"))
    assert view.ordinals == {"v000000": 0, "other": 1, "v000001": 2}


def test_events_of_other_runs_and_policies_change_nothing() -> None:
    view = view_of(published("a", run_id="another"), published("b", policy_id="critic"))
    assert view == ControlView(RUN)


def test_unpublished_version_has_no_ordinal() -> None:
    with pytest.raises(InvariantBroken):
        view_of(published("v000000")).ordinal("v000001")


@pytest.mark.parametrize(
    ("step", "branch", "label"), [(0, "", "v000000"), (12, "", "v000012"), (12, "b1", "v000012-b1")]
)
def test_version_label(step: int, branch: str, label: str) -> None:
    assert version_label(step, branch) == label


def test_rollback_gives_up_the_steps_behind_it() -> None:
    view = view_of(completed(1), completed(2), completed(3), rolled_back(1, "b1"), completed(2, "b1", "new"))
    assert {step: done.digest for step, done in view.completed.items()} == {1: "d", 2: "new"}
    assert (view.last_step, view.branch, view.rollbacks) == (2, "b1", 1)
    assert [view.label(step) for step in range(4)] == ["v000000", "v000001", "v000002-b1", "v000003-b1"]


def test_repeated_events_change_nothing() -> None:
    events = [
        published("v000000"),
        completed(1),
        completed(2),
        rolled_back(1, "b1"),
        completed(2, "b1", "new"),
    ]
    assert view_of(*(e for event in events for e in (event, event))) == view_of(*events)


def test_late_repeat_from_a_branch_that_was_given_up_does_not_come_back() -> None:
    view = view_of(completed(1), completed(2), rolled_back(1, "b1"), completed(2))
    assert view.last_step == 1


def test_a_step_keeps_its_first_batch_over_a_rollback() -> None:
    first, second = hand_made.manifest(RUN, 1, []), hand_made.manifest(RUN, 1, [], branch="b1")
    view = view_of(first, rolled_back(0, "b1"), second)
    assert view.batches == {1: first}


def request(step: int, branch: str = "") -> BatchRequested:
    return BatchRequested(run_id=RUN, occurred_at=0, step=step, batch_id="b", branch=branch)


@pytest.mark.parametrize(
    ("events", "needed"),
    [
        pytest.param([], True, id="never requested"),
        pytest.param([request(1)], False, id="open"),
        pytest.param([request(1), rolled_back(0, "b1")], True, id="voided by a rollback"),
        pytest.param([request(1), rolled_back(0, "b1"), request(1, "b1")], False, id="open on the branch"),
        pytest.param(
            [request(1), hand_made.manifest(RUN, 1, []), rolled_back(0, "b1")], False, id="answered before"
        ),
    ],
)
def test_when_a_batch_has_to_be_requested(events: list[Event], needed: bool) -> None:
    assert view_of(*events).needs_request(1) is needed


def test_requests_ends_and_activations_are_seen() -> None:
    view = view_of(
        BatchRequested(run_id=RUN, occurred_at=0, step=3, batch_id="b"),
        EndOfBatches(run_id=RUN, occurred_at=0, cause_offset=0, index=0, steps=3, reason="dataset"),
        PolicyActivated(run_id=RUN, occurred_at=0, version="v000001", engine_id="e0"),
        PolicyActivated(run_id=RUN, occurred_at=1, version="v000002", engine_id="e0"),
    )
    assert view.requested == {(3, "")}
    assert view.end_of_batches
    assert (view.active, view.activated) == ({"e0": "v000002"}, {"v000001", "v000002"})
