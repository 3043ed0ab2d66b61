"""Requests, roll-backs and the ends of a run, as tables of logs and what they cause."""

from __future__ import annotations

from control_log import (
    RUN,
    admitted,
    completed,
    configured,
    dataset_ended,
    failed,
    requested,
    rolled_back,
    run_ended,
    run_fold,
    summary,
)

from schemas import events as ev
from schemas.ids import batch_id


def test_a_step_that_was_answered_is_not_answered_again() -> None:
    log = [
        configured(batch__size=1),
        admitted("a"),
        admitted("b"),
        completed("a", ["v1"]),
        completed("b", ["v1"]),
    ]
    effects = run_fold(*log, requested(1), requested(1))
    assert summary(effects) == [("batch", 1, "a"), ("kept", "a", 0, "trained")]


def test_a_roll_back_voids_the_open_request_and_the_requests_of_the_old_branch() -> None:
    effects = run_fold(
        configured(batch__size=1), requested(5), rolled_back(3, "b1"), admitted("a"), completed("a", ["v1"]),
        requested(6), requested(5, "b1"),
    )  # fmt: skip
    assert summary(effects) == [("batch", 5, "a"), ("kept", "a", 0, "trained")]
    batch = effects[0]
    assert isinstance(batch, ev.TrainBatch)
    assert (batch.branch, batch.batch_id) == ("b1", batch_id(RUN, 5, "b1"))


def test_f14_the_last_batch_is_short_and_then_comes_the_end() -> None:
    effects = run_fold(
        configured(batch__size=2),
        requested(1),
        admitted("a"),
        dataset_ended(),
        completed("a", ["v1"]),
        run_ended(),
    )
    assert summary(effects) == [("batch", 1, "a"), ("kept", "a", 0, "trained"), ("end", "dataset_ended")]
    batch, end = effects[0], effects[-1]
    assert isinstance(batch, ev.TrainBatch)
    assert isinstance(end, ev.EndOfBatches)
    assert batch.short
    assert end.steps == 1


def test_without_short_batches_the_remainder_is_dropped() -> None:
    effects = run_fold(
        configured(batch__size=2, batch__short_last=False),
        requested(1),
        admitted("a"),
        dataset_ended(),
        completed("a", ["v1"]),
    )
    assert summary(effects) == [("dropped", "a", 0, "dataset_ended"), ("end", "dataset_ended")]


def test_a_short_remainder_waits_for_the_request_that_takes_it() -> None:
    log = [configured(batch__size=2), admitted("a"), completed("a", ["v1"]), dataset_ended()]
    assert run_fold(*log) == []
    assert summary(run_fold(*log, requested(1)))[-1] == ("end", "dataset_ended")


def test_the_end_waits_for_retries() -> None:
    log = [configured(batch__size=1), requested(1), admitted("a"), dataset_ended(), failed("a")]
    assert summary(run_fold(*log)) == [("retry", "a", 0, "timeout")]
    assert summary(run_fold(*log, admitted("a", 1), completed("a", ["v1"], 1)))[1:] == [
        ("batch", 1, "a"),
        ("kept", "a", 1, "trained"),
        ("end", "dataset_ended"),
    ]


def test_full_batches_go_out_one_by_one_before_the_short_one() -> None:
    groups = [event for name in "abc" for event in (admitted(name), completed(name, ["v1"]))]
    effects = run_fold(configured(batch__size=2), *groups, dataset_ended(), requested(1), requested(2))
    assert [line for line in summary(effects) if line[0] != "kept"] == [
        ("batch", 1, "a", "b"),
        ("batch", 2, "c"),
        ("end", "dataset_ended"),
    ]


def test_a_run_that_ends_drops_every_open_group() -> None:
    effects = run_fold(
        configured(batch__size=5), requested(1), admitted("run"), admitted("fail"), admitted("wait"), failed("fail"),
        completed("wait", ["v1"]), run_ended(),
    )  # fmt: skip
    assert summary(effects) == [
        ("retry", "fail", 0, "timeout"),
        ("dropped", "wait", 0, "run_ended"),
        ("dropped", "run", 0, "run_ended"),
        ("dropped", "fail", 1, "run_ended"),
        ("end", "run_ended"),
    ]


def test_a_group_whose_admission_crossed_the_end_has_a_verdict_too() -> None:
    effects = run_fold(configured(), run_ended(), admitted("a"), completed("a", ["v1"]), requested(1))
    assert summary(effects) == [("end", "run_ended"), ("dropped", "a", 0, "run_ended")]
