"""Admission as a pure function of the log: F1 to F4, F18, bounds, retries, repetitions and any order of the topics."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from control_log import RUN, completed, failed, logs, requested, rolled_back, run_ended, step_completed
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as ev
from schemas.codec import encode
from schemas.completed_brief import decode_briefly
from schemas.events import Event, identified
from schemas.ids import batch_id, group_id
from streams.admission import Admission, AdmissionState, Prompt, PromptOrder
from streams.admission_bounds import Limits, free_places
from streams.control_fold import fold
from streams.control_state import ControlState


def admitted(index: int, attempt: int = 0, epoch: int = 0) -> ev.GroupAdmitted:
    return identified(
        ev.GroupAdmitted(
            run_id=RUN, occurred_at=1, group_id=group_id(RUN, epoch, index), attempt=attempt, group_size=2, prompt_index=index,
            dataset_epoch=epoch, prompt_digest="d",
        )
    )  # fmt: skip


def verdict(
    index: int, outcome: ev.Outcome, attempt: int = 0, step: int | None = None, epoch: int = 0
) -> ev.Verdict:
    return identified(
        ev.Verdict(
            run_id=RUN, occurred_at=1, cause_offset=0, index=0, group_id=group_id(RUN, epoch, index), attempt=attempt,
            outcome=outcome, reason="x", next_attempt=attempt + 1 if outcome == "retry" else None,
            batch_id=None if step is None else batch_id(RUN, step),
        )
    )  # fmt: skip


def activated() -> ev.PolicyActivated:
    return identified(ev.PolicyActivated(run_id=RUN, occurred_at=1, version="v0", engine_id="e"))


def state_of(events: Iterable[Event]) -> AdmissionState:
    state = AdmissionState(RUN)
    for event in events:
        state.fold(event)
    return state


def next_prompts(
    state: AdmissionState, size: int, count: int = 99, **options: object
) -> list[tuple[int, int]]:
    order = PromptOrder(
        size, int(str(options.get("epochs", 1))), shuffle=bool(options.get("shuffle", False)), seed=1
    )
    found = order.remaining(state)
    return [(p.dataset_epoch, p.prompt_index) for p, _ in zip(found, range(count), strict=False)]


def test_f2_a_restart_goes_on_with_exactly_the_prompts_that_were_not_admitted() -> None:
    """Ids 0..7, batch 2, four in flight, one step trained: 0 and 3 are trained, 1 and 2 are still open."""
    log = [
        *map(admitted, range(4)),
        verdict(0, "kept", step=1),
        verdict(3, "kept", step=1),
        step_completed(1),
    ]
    state = state_of(log)
    assert next_prompts(state, 8) == [(0, 4), (0, 5), (0, 6), (0, 7)]
    assert {group.prompt.prompt_index for group in state.open_groups.values()} == {1, 2}


@settings(max_examples=100, deadline=None)
@given(logs())
def test_brief_events_change_the_state_as_whole_ones_do(log: list[Event]) -> None:
    control, whole, brief = ControlState(RUN), AdmissionState(RUN), AdmissionState(RUN)
    for offset, event in enumerate(log):
        for one in (event, *fold(control, offset, event)):
            whole.fold(one)
            brief.fold(decode_briefly(encode(one)))
    assert brief == whole


def test_f3_completion_out_of_order_moves_no_position() -> None:
    log = [*map(admitted, [0, 1, 2, 5]), verdict(5, "kept", step=1)]
    assert next_prompts(state_of(log), 7) == [(0, 3), (0, 4), (0, 6)]


def test_f4_what_was_admitted_is_still_there_after_a_restart_and_the_next_index_is_the_next_one() -> None:
    state = state_of([*map(admitted, range(3)), completed(group_id(RUN, 0, 1), ["v1", "v1"])])
    requested_before = {(group_id(RUN, 0, 0), 0), (group_id(RUN, 0, 1), 0)}
    assert state.unrequested(requested_before) == [Admission(Prompt(0, 2), group_id(RUN, 0, 2), 0)]
    assert next_prompts(state, 5, 1) == [(0, 3)]


def test_f18_dropped_groups_are_terminal_and_the_position_moves_past_them() -> None:
    state = state_of([*map(admitted, range(4)), *[verdict(i, "dropped") for i in range(4)]])
    assert state.open_groups == {}
    assert next_prompts(state, 6) == [(0, 4), (0, 5)]
    assert free_places(state, Limits(4, 2), 0) == 4


def test_an_attempt_with_an_end_or_a_newer_attempt_is_not_requested_again() -> None:
    log = [
        *map(admitted, range(4)),
        failed(group_id(RUN, 0, 0)),
        verdict(1, "retry"),
        verdict(2, "retry"),
        admitted(2, 1),
    ]
    again = state_of(log).unrequested(set())
    assert [(a.prompt.prompt_index, a.attempt) for a in again] == [(2, 1), (3, 0)]


def test_retries_keep_their_place_and_go_in_the_order_of_their_verdicts() -> None:
    state = state_of([activated(), *map(admitted, range(4)), verdict(2, "retry"), verdict(0, "retry")])
    assert [(a.prompt.prompt_index, a.attempt) for a in state.next_retries()] == [(2, 1), (0, 1)]
    assert free_places(state, Limits(4, 2), 0) == 0
    state.fold(admitted(2, 1))
    assert [a.prompt.prompt_index for a in state.next_retries()] == [0]


def test_nothing_is_retried_before_an_engine_is_up_or_after_the_run() -> None:
    log = [admitted(0), verdict(0, "retry")]
    assert state_of(log).next_retries() == []
    assert state_of([activated(), *log, run_ended()]).next_retries() == []


@pytest.mark.parametrize(
    ("eta", "steps", "kept", "open_groups", "free"),
    [
        (0, 0, 0, 0, 2), (0, 0, 0, 1, 1), (0, 0, 2, 0, 0), (0, 1, 2, 0, 2), (0, 1, 2, 2, 0),
        (1, 0, 0, 0, 4), (1, 0, 2, 2, 0), (1, 1, 2, 2, 2), (3, 0, 0, 0, 6), (None, 0, 0, 2, 4),
    ],
)  # fmt: skip
def test_f1_the_bound_is_eta_plus_trained_steps_plus_one_batches_and_a_restart_restores_it(
    eta: int | None, steps: int, kept: int, open_groups: int, free: int
) -> None:
    log: list[Event] = [*map(admitted, range(kept + open_groups))]
    log += [verdict(i, "kept", step=i // 2 + 1) for i in range(kept)]
    log += [step_completed(step + 1) for step in range(steps)]
    limits = Limits(6, 2, eta=eta)
    assert free_places(state_of(log), limits, 0) == free
    assert free_places(state_of(log + log), limits, 0) == free


def test_dropped_groups_do_not_count_for_the_bound() -> None:
    log = [*map(admitted, range(4)), *[verdict(i, "dropped") for i in range(4)]]
    assert free_places(state_of(log), Limits(8, 2, eta=0), 0) == 2


def test_a_roll_back_takes_trained_steps_away_and_old_ones_do_not_come_back() -> None:
    log = [step_completed(1), step_completed(2), step_completed(3), rolled_back(1, "b1"), step_completed(3)]
    state = state_of(log)
    assert state.trained_steps == 1
    for event in (step_completed(2, "b1"), rolled_back(1, "b1")):
        state.fold(event)
    assert state.trained_steps == 2


def test_a_batch_by_sequences_that_stays_short_lets_one_more_group_in() -> None:
    limits = Limits(2, 8, "sequences", group_size=4, eta=0)
    ends = [completed(group_id(RUN, 0, i), ["v", "v", "v", "v"], sequences=3) for i in range(2)]
    log: list[Event] = [admitted(0), admitted(1), ends[0]]
    state = state_of(log)
    assert free_places(state, limits, 0) == 0
    state.fold(ends[1])
    assert free_places(state, limits, 0) == 0
    state.fold(requested(1))
    assert free_places(state, limits, 0) == 1
    state.fold(admitted(2))
    assert free_places(state, limits, 0) == 0


def test_a_full_batch_that_only_waits_for_its_verdicts_lets_nothing_in() -> None:
    log = [
        requested(1),
        admitted(0),
        admitted(1),
        *[completed(group_id(RUN, 0, i), ["v", "v"]) for i in range(2)],
    ]
    assert free_places(state_of(log), Limits(2, 2), 0) == 0


def test_every_pass_is_a_permutation_of_its_own_that_depends_on_the_seed() -> None:
    order = PromptOrder(50, 2, shuffle=True, seed=1)
    first, second = list(order.of_epoch(0)), list(order.of_epoch(1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == list(PromptOrder(50, 2, shuffle=True, seed=1).of_epoch(0))
    assert first != list(PromptOrder(50, 2, shuffle=True, seed=2).of_epoch(0))
    assert list(PromptOrder(8, 1, shuffle=True, seed=0).of_epoch(0)) == [6, 7, 5, 4, 0, 2, 3, 1]


def test_epochs_follow_each_other_and_zero_is_endless() -> None:
    assert next_prompts(state_of([admitted(0)]), 2, epochs=2) == [(0, 1), (1, 0), (1, 1)]
    assert next_prompts(AdmissionState(RUN), 2, 7, epochs=0)[-1] == (3, 0)


def test_what_is_admitted_while_prompts_are_drawn_is_left_out() -> None:
    state = AdmissionState(RUN)
    found = PromptOrder(4, 1, shuffle=False, seed=0).remaining(state)
    assert next(found).prompt_index == 0
    state.fold(admitted(1))
    assert [prompt.prompt_index for prompt in found] == [2, 3]


_CONTROL = st.lists(
    st.one_of(
        st.builds(admitted, st.integers(0, 4), st.integers(0, 2)),
        st.builds(requested, st.integers(1, 3)),
        st.builds(step_completed, st.integers(1, 3)),
        st.just(activated()),
    ),
    max_size=15,
)
_VERDICTS = st.lists(
    st.one_of(
        st.builds(verdict, st.integers(0, 4), st.just("retry"), st.integers(0, 1)),
        st.builds(verdict, st.integers(0, 4), st.just("dropped"), st.integers(0, 2)),
        st.builds(verdict, st.integers(0, 4), st.just("kept"), st.integers(0, 2), st.integers(1, 3)),
    ),
    max_size=10,
    unique_by=lambda event: (event.group_id, event.attempt),
)


@settings(max_examples=150, deadline=None)
@given(_CONTROL, _VERDICTS, st.integers(0, 2**32), st.data())
def test_the_topics_may_arrive_in_any_order_and_repeatedly(
    control: list[Event], verdicts: list[ev.Verdict], seed: int, data: st.DataObject
) -> None:
    """Order holds per topic alone; nothing that a feeder decides may depend on how the two were merged."""
    kept = {v.group_id for v in verdicts if v.outcome == "kept"}
    consistent = [v for v in verdicts if not (v.outcome == "dropped" and v.group_id in kept)]
    consistent = list({(v.group_id, v.outcome != "retry"): v for v in consistent}.values())
    expected = facts(state_of([*control, *consistent]))
    left, right, merged = list(control), list(consistent), []
    rng = random.Random(seed)
    while left or right:
        side = left if left and (not right or rng.random() < 0.5) else right
        merged.append(side.pop(0))
    repeated = [*merged, *data.draw(st.lists(st.sampled_from(merged), max_size=4) if merged else st.just([]))]
    assert facts(state_of(merged)) == expected
    assert facts(state_of(repeated)) == expected


def facts(state: AdmissionState) -> tuple[object, ...]:
    open_groups = {group: (g.prompt, g.attempt) for group, g in state.open_groups.items()}
    retries = {g: a for g, a in state.retries.items() if g in state.open_groups}
    return (
        open_groups,
        retries,
        state.admitted,
        state.kept_groups,
        state.finished,
        state.trained_steps,
        state.activated,
    )
