"""Each law holds on a good run and is able to fail: one thing is broken, and that law alone names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from analytics_events import AT, RUN, admitted
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import SyntheticRun, group_name, small_run

from analytics.invariants import Check, check_run
from analytics.token_invariants import recorded_answers
from analytics.version_order import VersionOrder
from schemas import events as ev
from schemas import ids
from schemas.tokens import pack_ids
from schemas.window import VersionWindow

Break = Callable[[SyntheticRun], list[ev.Effect] | None]


def offending(checks: list[Check]) -> dict[str, tuple[str, ...]]:
    return {check.name: check.offending for check in checks if not check.ok}


def test_all_laws_hold_on_a_good_run_and_look_at_something(tmp_path: Path) -> None:
    checks = check_run(small_run(tmp_path).write())
    assert offending(checks) == {}
    assert all(check.checked > 0 for check in checks), [check.name for check in checks if not check.checked]


def lose_verdict(run: SyntheticRun) -> list[ev.Effect]:
    return [e for e in run.effects() if not (isinstance(e, ev.Verdict) and e.reason == "stale")]


def second_verdict(run: SyntheticRun) -> list[ev.Effect]:
    effects = run.effects()
    kept = next(e for e in effects if isinstance(e, ev.Verdict) and e.reason == "stale")
    return [*effects, ev.identified(msgspec.structs.replace(kept, attempt=kept.attempt + 1))]


def stale_group_in_batch(run: SyntheticRun) -> list[ev.Effect]:
    """The controller as it would be without the window: the stale group is kept and trained on."""
    done = next(e for e in run.events if isinstance(e, ev.GroupCompleted) and e.group_id == group_name(3))
    row = ev.BatchGroup(
        done.group_id,
        0,
        done.payload,
        done.sequences,
        done.trainable_tokens,
        tuple(t.version for t in done.trajectories),
    )
    batch = ids.batch_id(RUN, 2)
    effects = [
        msgspec.structs.replace(e, groups=(*e.groups, row))
        if isinstance(e, ev.TrainBatch) and e.batch_id == batch
        else e
        for e in run.effects()
    ]
    return [
        msgspec.structs.replace(e, outcome="kept", reason="trained", batch_id=batch)
        if isinstance(e, ev.Verdict) and e.reason == "stale"
        else e
        for e in effects
    ]


def other_window(run: SyntheticRun) -> list[ev.Effect]:
    return [
        msgspec.structs.replace(e, window=("v0", "v1", "v2"))
        if isinstance(e, ev.TrainBatch) and e.step == 2
        else e
        for e in run.effects()
    ]


def foreign_row(run: SyntheticRun) -> list[ev.Effect]:
    effects = run.effects()
    at = next(i for i, e in enumerate(effects) if isinstance(e, ev.TrainBatch))
    batch = effects[at]
    assert isinstance(batch, ev.TrainBatch)
    first = msgspec.structs.replace(batch.groups[0], trainable_tokens=1)
    effects[at] = msgspec.structs.replace(batch, groups=(first, *batch.groups[1:]))
    return effects


def batch_again(run: SyntheticRun) -> list[ev.Effect]:
    effects = run.effects()
    batch = next(e for e in effects if isinstance(e, ev.TrainBatch))
    return [*effects, msgspec.structs.replace(batch, short=True)]


def step_twice(run: SyntheticRun) -> None:
    step = next(e for e in run.events if isinstance(e, ev.StepCompleted))
    run.events.append(ev.identified(msgspec.structs.replace(step, branch="b")))


def changed_segment(run: SyntheticRun) -> None:
    """The archive holds other tokens than were assembled: facts, payload and the client's answer all disagree."""
    at = next(i for i, e in enumerate(run.events) if isinstance(e, ev.TokenSegment))
    segment = run.events[at]
    assert isinstance(segment, ev.TokenSegment)
    run.events[at] = msgspec.structs.replace(segment, output_ids=pack_ids([7, 7, 7]))


def lost_segment(run: SyntheticRun) -> None:
    at = next(i for i, e in enumerate(run.events) if isinstance(e, ev.TokenSegment) and e.segment_index == 1)
    del run.events[at]


@pytest.mark.parametrize(
    ("breaks", "laws"),
    [
        (lose_verdict, {"one_terminal_verdict_per_group"}),
        (second_verdict, {"one_terminal_verdict_per_group"}),
        (stale_group_in_batch, {"batches_inside_the_window"}),
        (other_window, {"batches_inside_the_window"}),
        (foreign_row, {"batches_hold_the_groups"}),
        (batch_again, {"no_batch_contributes_twice"}),
        (step_twice, {"no_batch_contributes_twice"}),
        (changed_segment, {"segments_make_the_groups", "payloads_hold_the_segments", "answers_are_archived"}),
        (lost_segment, {"segments_make_the_groups", "payloads_hold_the_segments", "answers_are_archived"}),
    ],
)
def test_what_is_broken_is_named_by_its_law(tmp_path: Path, breaks: Break, laws: set[str]) -> None:
    run = small_run(tmp_path)
    assert set(offending(check_run(run.write(breaks(run))))) == laws


def test_a_payload_file_with_other_bytes_offends(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path).write()
    file = next(path for path in (run_dir / "payloads").rglob("*") if path.is_file())
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert set(offending(check_run(run_dir))) == {"payloads_hold_the_segments"}


def test_an_answer_that_nobody_recorded_offends_a_torn_line_does_not(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path).write()
    answers = run_dir / "answers" / "worker-0.jsonl"
    line = {"parent_traj_id": "nobody", "segment_index": 0, "digest": hashlib.sha256(b"").hexdigest()}
    text = answers.read_text()
    answers.write_text(text + json.dumps(line))
    assert len(list(recorded_answers(run_dir))) == text.count("\n")
    assert offending(check_run(run_dir)) == {}
    answers.write_text(text + json.dumps(line) + "\n")
    assert offending(check_run(run_dir)) == {
        "answers_are_archived": ("answer 0 of nobody is not in the archive",)
    }


def test_a_text_answer_is_found_by_its_content(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    at = next(i for i, e in enumerate(run.events) if isinstance(e, ev.TokenSegment))
    segment = run.events[at]
    assert isinstance(segment, ev.TokenSegment)
    message = json.dumps({"role": "assistant", "content": "forty-two"})
    run.events[at] = msgspec.structs.replace(segment, response=message)
    run_dir = run.write()
    told = {
        "parent_traj_id": segment.parent_traj_id, "segment_index": segment.segment_index, "kind": "text",
        "digest": hashlib.sha256(b"forty-two").hexdigest(), "text": "forty-two",
    }  # fmt: skip
    (run_dir / "answers" / "worker-1.jsonl").write_text(json.dumps(told) + "\n")
    assert offending(check_run(run_dir)) == {}


def test_what_a_worker_did_again_after_the_completion_changes_nothing(tmp_path: Path) -> None:
    """It died before it could commit its place; its restart finds a closed attempt."""
    run = small_run(tmp_path)
    trajectory = ids.parent_traj_id(RUN, group_name(0), 0, 0)
    run.events.append(
        ev.identified(
            ev.SessionClaimed(
                run_id=RUN, occurred_at=AT + 60_000_000, session_id=trajectory, epoch=99, parent_traj_id=trajectory,
                group_id=group_name(0), attempt=0, sample_index=0, claimant="p", restart=True,
            )
        )
    )  # fmt: skip
    assert offending(check_run(run.write())) == {}


def test_steps_given_up_by_a_rollback_may_be_trained_again(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    second = [e for e in run.events if isinstance(e, ev.StepCompleted)][1]
    rolled = ev.RolledBack(run_id=RUN, occurred_at=AT, to_step=1, branch="b", reason="digest")
    run.events += [ev.identified(rolled), ev.identified(msgspec.structs.replace(second, branch="b"))]
    assert offending(check_run(run.write())) == {}


def test_a_group_without_any_verdict_and_a_verdict_without_a_group_offend(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    effects = run.effects()
    run.events.append(admitted("r-e0-p000099", index=99))
    assert list(offending(check_run(run.write(effects)))) == ["one_terminal_verdict_per_group"]


LABELS = st.sampled_from(["v0", "v1", "v2", "v3", " v1 ", "unknown", ""])


@given(
    keep=st.integers(0, 4),
    order=st.sampled_from(["published", "observed"]),
    log=st.lists(st.tuples(st.booleans(), st.lists(LABELS, min_size=1, max_size=3)), max_size=12),
)
def test_the_second_opinion_about_the_window_agrees_with_the_rule(
    keep: int, order: str, log: list[tuple[bool, list[str]]]
) -> None:
    rule, second = VersionWindow(keep, order), VersionOrder(keep, order)  # type: ignore[arg-type]
    for offset, (publishes, labels) in enumerate(log):
        if publishes:
            rule.publish(labels[0])
            second.publish(labels[0], offset)
        else:
            rule.observe(labels)
            second.observe(labels, offset)
        assert second.labels() == rule.labels
        assert second.live() == tuple(rule.labels[rule.cutoff_index :])
