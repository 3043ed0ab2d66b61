"""A replayed event is the event that the new run itself would have written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from analytics_events import AT, RUN, segment
from synthetic_run import group_name, small_run

from analytics.replay_ids import ReplayIds
from schemas import events as ev
from schemas import ids


def kept(ref: ev.PayloadRef, group: str, attempt: int) -> ev.PayloadRef:
    return msgspec.structs.replace(ref, uri=f"{group}/{attempt}/{ref.sha256}")


def mapping(events: list[ev.Event], old: str = RUN, new: str = "r2") -> ReplayIds:
    return ReplayIds(old, new, events, kept)


def test_ids_are_computed_for_the_new_run() -> None:
    turns: list[ev.Event] = [
        segment("r-e0-p000003", 1, 0),
        segment("r-e0-p000003", 1, 1),
        segment("r-e0-p000003", 1, 2, lineage_start=2),
    ]
    there = [mapping(turns).rewrite(turn) for turn in turns]
    parent = ids.parent_traj_id("r2", "r2-e0-p000003", 0, 1)
    assert {(e.run_id, e.group_id, e.parent_traj_id, e.session_id) for e in there} == {
        ("r2", "r2-e0-p000003", parent, parent)
    }  # type: ignore[attr-defined]
    assert [e.lineage_id for e in there] == [ids.lineage_id(parent, start) for start in (0, 0, 2)]  # type: ignore[attr-defined]
    assert [e.event_id for e in there] == [ev.identified(e).event_id for e in there]
    assert there[0].event_id != turns[0].event_id


def test_a_free_session_keeps_its_id_and_gets_the_new_runs_trajectory() -> None:
    free = msgspec.structs.replace(
        segment("g", 0, 0), kind="free", group_id=None, attempt=None, sample_index=None, session_id="abc",
        parent_traj_id=ids.free_traj_id(RUN, "abc"),
    )  # fmt: skip
    there = mapping([free]).rewrite(free)
    assert (there.session_id, there.parent_traj_id) == ("abc", ids.free_traj_id("r2", "abc"))


def test_a_reward_goes_to_its_trajectory() -> None:
    turn = segment("r-e0-p000003", 1, 0)
    reward = ev.RewardAssigned(
        run_id=RUN, occurred_at=AT, parent_traj_id=turn.parent_traj_id, group_id=turn.group_id, attempt=0, sample_index=1,
        reward=1.0, source="judge",
    )  # fmt: skip
    assert mapping([turn]).rewrite(reward).parent_traj_id == mapping([turn]).rewrite(turn).parent_traj_id


@pytest.mark.parametrize(("branch", "batch_branch"), [("", ""), ("b1", "b1"), ("b1", "")])
def test_batches_keep_step_and_branch(branch: str, batch_branch: str) -> None:
    step = ev.StepCompleted(
        run_id=RUN, occurred_at=AT, step=4, branch=branch, batch_id=ids.batch_id(RUN, 4, batch_branch), digest="d",
        checkpoint_step=4, metrics={},
    )  # fmt: skip
    assert mapping([]).rewrite(step).batch_id == ids.batch_id("r2", 4, batch_branch)


def test_payloads_move_to_the_new_group() -> None:
    ref = ev.PayloadRef(uri="old", sha256="s", size=1, codec="c")
    turn = msgspec.structs.replace(segment("r-e0-p000003", 1, 0, attempt=2), tokens_ref=ref)
    there = mapping([turn]).rewrite(turn)
    assert there.tokens_ref is not None
    assert there.tokens_ref.uri == "r2-e0-p000003/2/s"


def test_times_move_together() -> None:
    turn = segment("g", 0, 0)
    there = mapping([turn]).rewrite(turn, 500)
    assert [there.occurred_at, there.received_at, there.first_token_at, there.done_at] == [
        time + 500 for time in (turn.occurred_at, turn.received_at, turn.first_token_at, turn.done_at)
    ]


def test_there_and_back_is_the_same_run(tmp_path: Path) -> None:
    events = [
        e for e in small_run(tmp_path).events if not isinstance(e, ev.RunConfigured | ev.GroupCompleted)
    ]
    events = [e for e in events if not isinstance(e, ev.SequenceFeedback)]
    there = mapping(events)
    moved = [there.rewrite(event) for event in events]
    back = mapping(moved, "r2", RUN)
    assert [back.rewrite(event) for event in moved] == events
    assert group_name(0) not in str(moved)
