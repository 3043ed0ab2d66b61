"""`staleness.mode`, over-sampling and retries as laws of the whole loop: any speed of workers and trainer, any order."""

from __future__ import annotations

from collections import Counter

import pytest
from admission_world import SECOND, World
from control_log import RUN, completed, published, requested
from hypothesis import given, settings
from hypothesis import strategies as st
from test_feeder_admission import activated, admitted, state_of

from schemas import events as ev
from schemas.errors import ConfigError
from schemas.events import identified
from schemas.ids import group_id
from schemas.settings import load
from streams.admission import AdmissionState
from streams.admission_bounds import Limits, free_places
from streams.trainer_pace import TrainerPace

_WORLDS = {
    "batch__size": st.integers(1, 4),
    "batch__by": st.sampled_from(["groups", "sequences"]),
    "batch__sampler": st.sampled_from(["fifo", "freshest_first"]),
    "group__size": st.just(2),
    "window__keep_versions": st.integers(1, 3),
    "feeder__max_outstanding_groups": st.integers(4, 12),
}
_WAITING = _WORLDS | {"batch__by": st.just("groups")}


def outcomes(world: World) -> Counter[str]:
    return Counter(f"{v.outcome}:{v.reason}" for v in world.verdicts())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.fixed_dictionaries(_WAITING))
def test_wait_lets_no_group_become_stale_and_the_run_ends(seed: int, sets: dict[str, object]) -> None:
    world = World(seed, 30, staleness__mode="wait", **sets)
    world.fails = lambda prompt, attempt: prompt % 5 == 0 and attempt == 0
    world.run()
    assert set(outcomes(world)) == {"kept:trained", "retry:timeout"}
    assert outcomes(world)["kept:trained"] == 30


def test_the_same_runs_lose_groups_when_only_the_window_acts() -> None:
    sets = {"batch__size": 2, "window__keep_versions": 1, "feeder__max_outstanding_groups": 12}
    stale = 0
    for seed in range(5):
        world = World(seed, 30, **sets)
        world.run()
        stale += outcomes(world)["dropped:stale"]
    assert stale > 10


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["drop", "wait", "pace"]), st.integers(0, 3))
def test_prompts_that_always_fail_leave_and_starve_nobody(seed: int, mode: str, retries: int) -> None:
    """More of them than places: every place comes free again after `max_retries + 1` attempts."""
    world = World(
        seed, 24, staleness__mode=mode, batch__size=2, window__keep_versions=3, group__max_retries=retries,
        feeder__max_outstanding_groups=4,
    )  # fmt: skip
    world.fails = lambda prompt, _attempt: prompt < 12
    world.run()
    attempts = Counter(e.group_id for e in world.log if isinstance(e, ev.GroupAdmitted))
    hopeless = {group_id(RUN, 0, prompt) for prompt in range(12)}
    assert {attempts[group] for group in hopeless} == {retries + 1}
    assert {v.group_id for v in world.verdicts() if v.reason == "retry_exhausted"} == hopeless
    ended = {v.group_id for v in world.verdicts() if v.outcome != "retry"}
    assert len(ended) == 24
    assert world.most_open <= 4


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2), st.sampled_from([1.0, 2.0, 4.0]))
def test_dropped_zero_variance_groups_are_replaced_until_batches_are_full(
    seed: int, eta: int, oversample: float
) -> None:
    world = World(
        seed, 40, batch__size=3, group__drop_zero_variance=True, feeder__eta=eta, feeder__oversample=oversample,
        window__keep_versions=0, feeder__max_outstanding_groups=12,
    )  # fmt: skip
    world.flat = lambda prompt: prompt % 2 == 0
    world.run()
    assert outcomes(world) == {"kept:trained": 20, "dropped:zero_variance": 20}
    batches = [effect for effect in world.effects if isinstance(effect, ev.TrainBatch)]
    assert {len(batch.groups) for batch in batches[:-1]} == {3}


def test_wait_admits_batches_up_to_the_window_and_a_slow_group_holds_it_back() -> None:
    limits = Limits(99, 2, mode="wait", keep_versions=2)
    log: list[ev.Event] = [published("v0"), activated(), *map(admitted, range(4))]
    state = state_of(log)
    assert free_places(AdmissionState(RUN), limits, 0) > 0
    assert free_places(state, limits, 0) == 0  # two batches of two: the second is trained with a gap of one
    for step in (1, 2):
        group = group_id(RUN, 0, step)
        for event in (
            completed(group, ["v0", "v0"]),
            identified(_kept(group, step)),
            identified(ev.PolicyPublished(run_id=RUN, occurred_at=1, version=f"v{step}", step=step)),
        ):
            state.fold(event)
    # group 0 still runs at v0 and the newest is v2: nothing may be added that could be trained before it
    assert free_places(state, limits, 0) == 0


def _kept(group: str, step: int) -> ev.Verdict:
    return ev.Verdict(
        run_id=RUN, occurred_at=1, cause_offset=0, index=0, group_id=group, attempt=0, outcome="kept", reason="trained",
        batch_id=requested(step).batch_id,
    )  # fmt: skip


def test_with_one_version_kept_nothing_is_admitted_while_a_batch_is_in_training() -> None:
    limits = Limits(99, 1, mode="wait", keep_versions=1)
    state = state_of(
        [published("v0"), activated(), admitted(0), completed(group_id(RUN, 0, 0), ["v0", "v0"])]
    )
    assert free_places(state, limits, 0) == 0
    state.fold(identified(_kept(group_id(RUN, 0, 0), 1)))
    assert free_places(state, limits, 0) == 0
    state.fold(identified(ev.PolicyPublished(run_id=RUN, occurred_at=1, version="v1", step=1)))
    assert free_places(state, limits, 0) == 0  # engines still have v0
    state.fold(identified(ev.PolicyActivated(run_id=RUN, occurred_at=1, version="v1", engine_id="e")))
    assert free_places(state, limits, 0) == 1


def test_wait_is_refused_where_nobody_can_know_how_many_batches_the_open_groups_fill() -> None:
    """A trajectory that split into lineages gives several sequences: one group of two samples may fill many batches."""
    with pytest.raises(ConfigError, match=r"wait needs batch\.by = groups"):
        load(sets=("staleness.mode=wait", "batch.by=sequences"))
    assert load(sets=("staleness.mode=pace", "batch.by=sequences")).batch.by == "sequences"


def test_wait_without_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="wait needs a window"):
        load(sets=("staleness.mode=wait", "window.keep_versions=0"))


def _at(event: ev.Event, second: int) -> ev.Event:
    import msgspec

    return msgspec.structs.replace(event, occurred_at=second * SECOND)


def _batch(step: int, second: int) -> ev.TrainBatch:
    return ev.TrainBatch(
        run_id=RUN, occurred_at=second * SECOND, cause_offset=0, index=0, batch_id=requested(step).batch_id, step=step,
        groups=(), current_version="", cutoff_version="", window=(),
    )  # fmt: skip


def test_the_pace_is_the_trainers_work_without_its_waiting_in_any_order_of_the_topics() -> None:
    """Asked at 0, 40 and 50; batches at 30 and 45: 10 and 5 seconds of work."""
    asked = [_at(requested(step), at) for step, at in ((1, 0), (2, 40), (3, 50))]
    began = [_batch(1, 30), _batch(2, 45)]
    for log in ([*asked, *began], [*began, *asked, *asked]):
        assert state_of(log).pace.step_us("") == 7.5 * SECOND
    assert state_of(asked).pace.step_us("") is None
    assert state_of([*asked, *began]).pace.step_us("b1") is None


def test_the_pace_forgets_old_steps() -> None:
    pace = TrainerPace()
    for step in range(1, 400):
        pace.asked("", step, step * 10)
        pace.began("", step, step * 10 + (9 if step < 300 else 2))
    assert pace.step_us("") == 8
    assert len(pace._asked) == len(pace._began) < 100


def test_pace_admits_as_many_groups_as_the_trainer_takes() -> None:
    """A step of 10 seconds, batches of 4: one group per 2.5 seconds, and a late poll catches up."""
    limits = Limits(99, 4, mode="pace")
    work = [_at(requested(1), 0), _batch(1, 0), _at(requested(2), 10)]
    assert free_places(state_of([activated()]), limits, 0) == 8
    state = state_of([activated(), *work, _at(admitted(0), 100)])
    for second, free in ((100, 4), (101, 4)):
        assert free_places(state, limits, second * SECOND) == free
    for index in range(1, 4):
        state.fold(_at(admitted(index), 101))
    assert free_places(state, limits, 101 * SECOND) == 1
    state.fold(_at(admitted(4), 101))
    for tenths, free in ((1010, 0), (1024, 0), (1026, 1), (1049, 1), (1051, 2), (9999, 4)):
        assert free_places(state, limits, tenths * SECOND // 10) == free


def test_pace_admits_nothing_while_a_batch_waits_and_counts_what_filters_take() -> None:
    limits = Limits(99, 2, mode="pace")
    work = [_at(requested(1), 0), _batch(1, 0), _at(requested(2), 10)]
    done = [completed(group_id(RUN, 0, i), ["v", "v"]) for i in range(2)]
    waiting = state_of([activated(), *work, admitted(0), admitted(1), *done])
    assert free_places(waiting, limits, 1000 * SECOND) == 0
    half = state_of([activated(), *work])
    half.kept_groups, half.dropped_groups, half.open_request = 5, 5, None
    half.new_at.extend([100 * SECOND] * 64)
    owed = 100 * SECOND + (64 - 2) * 2.5 * SECOND
    assert free_places(half, limits, int(owed) - 1) == 0
    assert free_places(half, limits, int(owed)) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.fixed_dictionaries(_WORLDS), st.sampled_from(["drop", "wait", "pace"]), st.integers(0, 2),
    st.integers(20, 300),
)  # fmt: skip
def test_f1_a_restart_admits_as_many_as_before_however_the_topics_are_merged(
    seed: int, sets: dict[str, object], mode: str, eta: int, actions: int
) -> None:
    """The feeder that starts again reads three topics from their beginnings; order holds per topic alone."""
    sets = sets | {"batch__by": "groups"} if mode == "wait" else sets
    world = World(seed, 200, staleness__mode=mode, feeder__eta=eta, **sets)
    world.act(actions)
    batches = [effect for effect in world.effects if isinstance(effect, ev.TrainBatch)]
    topics: list[list[ev.Event]] = [list(world.log), list(world.verdicts()), list(batches)]
    again = AdmissionState(RUN)
    while any(topics):
        again.fold(world.rng.choice([topic for topic in topics if topic]).pop(0))
    for second in (0, 1, 7, 100):
        now = world.now + second * SECOND
        assert free_places(again, world.limits, now) == free_places(world.admission, world.limits, now)
    assert again.next_retries() == world.admission.next_retries()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.fixed_dictionaries(_WORLDS))
def test_pace_comes_to_an_end_whatever_the_speeds(seed: int, sets: dict[str, object]) -> None:
    world = World(seed, 30, staleness__mode="pace", **sets)
    world.run(20_000)
    assert sum(1 for v in world.verdicts() if v.outcome != "retry") == 30
