"""Rules 1, 2, 3 and 7 and batches, as tables of logs and what they cause."""

from __future__ import annotations

import msgspec
import pytest
from control_log import (
    RUN,
    admitted,
    completed,
    configured,
    failed,
    published,
    requested,
    run_fold,
    summary,
)

from schemas import events as ev
from schemas.codec import encode
from schemas.completed_brief import CompletedBrief, decode_briefly
from schemas.errors import IncompatibleEvent
from schemas.ids import batch_id
from streams.control_fold import fold
from streams.control_state import ControlState


def test_a_batch_goes_out_when_a_request_is_open_and_enough_groups_wait() -> None:
    effects = run_fold(
        configured(batch__size=2), requested(1),
        admitted("a"), admitted("b"), completed("a", ["v1", "v1"]), completed("b", ["v1", "v1"]),
    )  # fmt: skip
    assert summary(effects) == [
        ("batch", 1, "a", "b"),
        ("kept", "a", 0, "trained"),
        ("kept", "b", 0, "trained"),
    ]
    assert [(e.cause_offset, e.index, e.occurred_at) for e in effects] == [(5, 0, 3), (5, 1, 3), (5, 2, 3)]
    batch = effects[0]
    assert isinstance(batch, ev.TrainBatch)
    assert batch.batch_id == batch_id(RUN, 1)
    assert (batch.current_version, batch.cutoff_version, batch.window) == ("v1", "v1", ("v1",))
    assert not batch.short
    assert batch.groups[0].versions == ("v1", "v1")
    kept = effects[1]
    assert isinstance(kept, ev.Verdict)
    assert kept.batch_id == batch.batch_id


def test_three_groups_complete_while_the_batch_needs_one() -> None:
    """F5: the other two wait for the next batches, first completed first out."""
    groups = [event for name in "cab" for event in (admitted(name), completed(name, ["v1", "v1"]))]
    effects = run_fold(configured(batch__size=1), requested(1), *groups, requested(2), requested(3))
    assert [line for line in summary(effects) if line[0] == "batch"] == [
        ("batch", 1, "c"),
        ("batch", 2, "a"),
        ("batch", 3, "b"),
    ]


def test_a_batch_by_sequences_takes_groups_until_there_are_enough() -> None:
    effects = run_fold(
        configured(batch__by="sequences", batch__size=5), requested(1),
        admitted("a"), admitted("b"), admitted("c"),
        completed("a", ["v1", "v1"], sequences=2), completed("b", ["v1", "v1"], sequences=4), completed("c", ["v1", "v1"]),
    )  # fmt: skip
    assert summary(effects)[0] == ("batch", 1, "a", "b")


def test_freshest_first_takes_the_group_whose_oldest_version_is_newest() -> None:
    effects = run_fold(
        configured(batch__size=1, batch__sampler="freshest_first", window__keep_versions=3), published("v1"), published("v2"),
        admitted("old"), admitted("mixed"), admitted("new"),
        completed("old", ["v1", "v1"]), completed("mixed", ["v1", "v2"]), completed("new", ["v2", "v2"]),
        requested(1), requested(2), requested(3),
    )  # fmt: skip
    assert [line[2] for line in summary(effects) if line[0] == "batch"] == ["new", "old", "mixed"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_pending_group_is_judged_again_when_a_version_is_published(keep: int) -> None:
    effects = run_fold(
        configured(window__keep_versions=keep, batch__size=1), published("v1"), admitted("a"), completed("a", ["v1", "v1"]),
        *[published(f"v{n + 2}") for n in range(keep)], requested(1),
    )  # fmt: skip
    assert summary(effects) == [("dropped", "a", 0, "stale")]
    verdict = effects[0]
    assert isinstance(verdict, ev.Verdict)
    assert verdict.cause_offset == 3 + keep
    assert (verdict.current_index, verdict.cutoff_index, verdict.gap_min, verdict.gap_max) == (
        keep,
        1,
        keep,
        keep,
    )


def test_w9_a_pending_group_is_dropped_when_a_completion_shows_a_newer_version() -> None:
    effects = run_fold(
        configured(window__keep_versions=1), admitted("a"), admitted("b"),
        completed("a", ["old", "old"]), completed("b", ["new", "new"]),
    )  # fmt: skip
    assert summary(effects) == [("dropped", "a", 0, "stale")]


def test_w8_any_stale_trajectory_drops_the_group_and_one_without_version_has_no_say() -> None:
    effects = run_fold(
        configured(window__keep_versions=1), published("old"), published("new"), admitted("a"), admitted("b"),
        completed("a", ["", "old"]), completed("b", ["unknown", "-1"]),
    )  # fmt: skip
    assert summary(effects) == [("dropped", "a", 0, "stale")]


def test_w6_a_trajectory_without_an_id_neither_advances_nor_drops() -> None:
    nameless = completed("a", ["alpha", "alpha"])
    facts = tuple(msgspec.structs.replace(t, parent_traj_id="") for t in nameless.trajectories)
    state = ControlState(RUN)
    effects = run_fold(
        configured(window__keep_versions=1), published("v1"), published("v2"), admitted("a"),
        msgspec.structs.replace(nameless, trajectories=facts), state=state,
    )  # fmt: skip
    assert effects == []
    assert state.window.labels == ["v1", "v2"]


def test_f6_with_one_version_kept_no_group_of_two_policies_gets_through() -> None:
    effects = run_fold(
        configured(window__keep_versions=1, batch__size=1), requested(1), published("v1"), admitted("a"), published("v2"),
        completed("a", ["v1", "v2"]),
    )  # fmt: skip
    assert summary(effects) == [("dropped", "a", 0, "stale")]


def test_f7_waiting_in_the_queue_counts_as_lag() -> None:
    effects = run_fold(
        configured(window__keep_versions=3, batch__size=1), published("v1"), admitted("a"), completed("a", ["v1", "v1"]),
        published("v2"), published("v3"), requested(1),
    )  # fmt: skip
    kept = effects[1]
    assert isinstance(kept, ev.Verdict)
    assert (kept.gap_min, kept.gap_max, kept.gap_mean) == (2, 2, 2.0)


def test_a_failed_group_advances_the_window() -> None:
    effects = run_fold(
        configured(window__keep_versions=1, group__max_retries=0), admitted("a"), admitted("b"),
        completed("a", ["v1", "v1"]), failed("b", versions=["v2"]),
    )  # fmt: skip
    assert summary(effects) == [("dropped", "a", 0, "stale"), ("dropped", "b", 0, "retry_exhausted")]


def test_a_version_seen_late_that_was_published_earlier_never_counts_as_newest() -> None:
    log = [
        published("v1"),
        published("v2"),
        admitted("a"),
        admitted("b"),
        completed("a", ["v2"]),
        completed("b", ["v1"]),
    ]
    right, state = ControlState(RUN), ControlState(RUN)
    ours = run_fold(configured(window__keep_versions=1), *log, state=right)
    plain = run_fold(configured(window__keep_versions=1, window__order="observed"), *log, state=state)
    assert summary(ours) == [("dropped", "b", 0, "stale")]
    assert summary(plain) == [("dropped", "a", 0, "stale")]
    assert right.window.late_sightings == state.window.late_sightings == 1


def test_window_off_keeps_everything() -> None:
    effects = run_fold(
        configured(window__keep_versions=0, batch__size=1), published("v1"), admitted("a"), completed("a", ["v1"]),
        *[published(f"v{n}") for n in range(2, 9)], requested(1),
    )  # fmt: skip
    assert summary(effects) == [("batch", 1, "a"), ("kept", "a", 0, "trained")]


def test_failures_are_retried_up_to_the_limit() -> None:
    effects = run_fold(
        configured(group__max_retries=2),
        admitted("a"), failed("a"), admitted("a", 1), failed("a", 1), admitted("a", 2), failed("a", 2), admitted("a", 3),
    )  # fmt: skip
    assert summary(effects) == [
        ("retry", "a", 0, "timeout"),
        ("retry", "a", 1, "timeout"),
        ("dropped", "a", 2, "retry_exhausted"),
    ]
    first = effects[0]
    assert isinstance(first, ev.Verdict)
    assert first.next_attempt == 1


def test_a_requeued_stale_group_uses_up_retries() -> None:
    effects = run_fold(
        configured(group__max_retries=1, group__on_stale="requeue", window__keep_versions=1), published("v1"), admitted("a"),
        completed("a", ["v1"]), published("v2"), admitted("a", 1), completed("a", ["v2"], 1), published("v3"),
    )  # fmt: skip
    assert summary(effects) == [("retry", "a", 0, "stale"), ("dropped", "a", 1, "retry_exhausted")]


@pytest.mark.parametrize("later", [completed("a", ["v1"]), failed("a"), failed("a", 1)])
def test_the_first_terminal_event_of_an_attempt_wins(later: ev.Event) -> None:
    state = ControlState(RUN)
    effects = run_fold(configured(), admitted("a"), failed("a"), later, state=state)
    assert summary(effects) == [("retry", "a", 0, "timeout")]
    assert state.counters["late_ends"] == 1


def test_a_completion_that_crossed_its_time_out_is_ignored_while_the_next_attempt_runs() -> None:
    effects = run_fold(
        configured(batch__size=1), requested(1), admitted("a"), failed("a"), admitted("a", 1), completed("a", ["v1"]),
        completed("a", ["v1"], 1),
    )  # fmt: skip
    assert summary(effects) == [("retry", "a", 0, "timeout"), ("batch", 1, "a"), ("kept", "a", 1, "trained")]


def test_a_group_that_nobody_admitted_is_ignored_and_counted() -> None:
    state = ControlState(RUN)
    effects = run_fold(
        configured(batch__size=1, window__keep_versions=1),
        requested(1),
        completed("x", ["v9"]),
        failed("y"),
        state=state,
    )
    assert effects == []
    assert state.counters["unknown_groups"] == 2
    assert state.window.labels == []


def test_zero_variance_is_dropped_by_setting_only() -> None:
    log = [requested(1), admitted("a"), completed("a", ["v1", "v1"], rewards=[1.0, 1.0])]
    assert summary(run_fold(configured(batch__size=1, group__drop_zero_variance=True), *log)) == [
        ("dropped", "a", 0, "zero_variance")
    ]
    assert summary(run_fold(configured(batch__size=1), *log))[0] == ("batch", 1, "a")


def test_failed_trajectories_take_no_part_in_the_variance() -> None:
    group = completed("a", ["v1", "v1", "v1"], rewards=[1.0, 1.0, 0.0])
    facts = (*group.trajectories[:2], msgspec.structs.replace(group.trajectories[2], status="failed"))
    log = [admitted("a"), msgspec.structs.replace(group, trajectories=facts)]
    assert summary(run_fold(configured(group__drop_zero_variance=True), *log)) == [
        ("dropped", "a", 0, "zero_variance")
    ]


def test_a_group_without_sequences_cannot_be_trained_on() -> None:
    effects = run_fold(configured(), admitted("a"), completed("a", ["v1"], sequences=0))
    assert summary(effects) == [("dropped", "a", 0, "no_sequences")]


def test_another_run_and_another_kind_have_no_say() -> None:
    state = ControlState(RUN)
    foreign = msgspec.structs.replace(completed("a", ["v1"]), run_id="other")
    evaluation = msgspec.structs.replace(completed("a", ["v1"]), kind="eval")
    log = [configured("other"), configured(batch__size=1), requested(1), admitted("a"), foreign, evaluation]
    assert run_fold(*log, state=state) == []
    assert state.counters["other_run"] == 2


def test_only_the_first_configuration_of_the_run_counts() -> None:
    log = [
        configured(batch__size=1),
        configured(batch__size=2),
        requested(1),
        admitted("a"),
        completed("a", ["v1"]),
    ]
    assert summary(run_fold(*log))[0] == ("batch", 1, "a")


def test_before_the_configuration_nothing_counts() -> None:
    state = ControlState(RUN)
    run_fold(admitted("a"), published("v1"), configured(), state=state)
    assert state.open_groups == 0
    assert state.counters["before_configuration"] == 2


def test_settings_that_do_not_fold_leave_the_state_as_it_was() -> None:
    state = ControlState(RUN)
    wrong = msgspec.structs.replace(configured(), settings='{"window": {}}')
    with pytest.raises(IncompatibleEvent):
        fold(state, 0, wrong)
    assert state == ControlState(RUN)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"group__min_live_trajectories": 2}, "too_few_live"),
        ({"group__drop_zero_variance": True}, "zero_variance"),
        ({"group__filter": "control_log:keeps_odd_lengths"}, "filtered"),
    ],
)
def test_a_rule_that_looks_at_facts_reads_the_whole_of_a_brief_event(
    rule: dict[str, object], reason: str
) -> None:
    event = completed("a", ["v1", "v1"], rewards=(1.0, 1.0), tokens=2, failures=1)
    brief = decode_briefly(encode(event))
    assert isinstance(brief, CompletedBrief)
    state = ControlState(RUN)
    for offset, record in enumerate((configured(**rule), admitted("a"))):
        fold(state, offset, record)
    assert summary(fold(state, 2, brief)) == [("dropped", "a", 0, reason)]
