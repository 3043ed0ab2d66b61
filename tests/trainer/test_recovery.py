"""Where the trainer goes on after a restart, as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import InvariantBroken
from trainer.recovery import CheckpointFact, plan_recovery

LOG = {1: "d1", 2: "d2", 3: "d3"}


def checkpoint(step: int, digest: str, *, parent: str = "", branch: str = "") -> CheckpointFact:
    return CheckpointFact(Path(f"c{step}-{digest}"), step, branch, digest, parent)


C1, C2, C3 = (
    checkpoint(1, "d1", parent="d0"),
    checkpoint(2, "d2", parent="d1"),
    checkpoint(3, "d3", parent="d2"),
)
C4 = checkpoint(4, "d4", parent="d3")


@pytest.mark.parametrize(
    ("log", "checkpoints", "chosen", "announce", "again"),
    [
        pytest.param({}, [], None, False, (), id="first start"),
        pytest.param(LOG, [C2, C3], C3, False, (), id="equal"),
        pytest.param(LOG, [C3, C4], C4, True, (), id="one ahead of the log"),
        pytest.param({}, [C1], C1, True, (), id="first step ahead of an empty log"),
        pytest.param(LOG, [C1], C1, False, (2, 3), id="behind"),
        pytest.param(LOG, [], None, False, (1, 2, 3), id="all checkpoints lost"),
        pytest.param(LOG, [C1, checkpoint(3, "other")], C1, False, (2, 3), id="newest of another history"),
        pytest.param(
            LOG,
            [C2, checkpoint(4, "d4", parent="other")],
            C2,
            False,
            (3,),
            id="ahead, but not from our weights",
        ),
    ],
)
def test_plan(
    log: dict[int, str],
    checkpoints: list[CheckpointFact],
    chosen: CheckpointFact | None,
    announce: bool,
    again: tuple[int, ...],
) -> None:
    plan = plan_recovery(log, "d0", "", checkpoints)
    assert (plan.checkpoint, plan.announce, plan.again) == (chosen, announce, again)


def test_checkpoint_of_a_branch_that_was_given_up_is_not_taken() -> None:
    abandoned = checkpoint(2, "x2", parent="d1", branch="")
    plan = plan_recovery({1: "d1"}, "d0", "b1", [C1, abandoned, checkpoint(5, "x5")])
    assert (plan.checkpoint, plan.announce, plan.again) == (C1, False, ())


def test_checkpoint_one_ahead_on_the_branch_is_announced() -> None:
    ahead = checkpoint(2, "n2", parent="d1", branch="b1")
    plan = plan_recovery({1: "d1"}, "d0", "b1", [C1, ahead])
    assert (plan.checkpoint, plan.announce) == (ahead, True)


def test_log_that_lost_steps_is_refused() -> None:
    with pytest.raises(InvariantBroken) as refused:
        plan_recovery({1: "d1"}, "d0", "", [C1, C3])
    assert refused.value.detail == {"checkpoint_step": 3, "completed_step": 1}
