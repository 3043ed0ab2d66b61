"""What the feeder knows is a function of its three topics: read in any order between them, and facts any number of times."""

from __future__ import annotations

import random

from admission_world import World
from control_log import RUN, requested
from hypothesis import given, settings
from hypothesis import strategies as st
from test_feeder_admission import admitted, verdict

from schemas import events as ev
from schemas.events import Event
from schemas.ids import group_id
from streams.admission import AdmissionState

_FACTS = (
    "admitted", "retries", "finished", "kept_groups", "dropped_groups", "open_request", "emitted", "trained_steps",
    "published_steps", "ordinals", "active", "activated", "dataset_ended", "ended", "open_groups",
)  # fmt: skip


def told(state: AdmissionState) -> dict[str, object]:
    return {name: getattr(state, name) for name in _FACTS}


def read_anyhow(dice: random.Random, topics: list[list[Event]]) -> AdmissionState:
    """A feeder that starts: some records of one topic, some of another, and now and then an old one again."""
    state, at = AdmissionState(RUN), [0] * len(topics)
    while left := [n for n, topic in enumerate(topics) if at[n] < len(topic)]:
        number = dice.choice(left)
        for event in topics[number][at[number] : at[number] + dice.randint(1, 30)]:
            at[number] += 1
            state.fold(event)
            if dice.random() < 0.2:
                state.fold(dice.choice(topics[number][: at[number]]))
    return state


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["drop", "wait", "pace"]), st.integers(20, 400))
def test_a_feeder_that_starts_again_knows_what_its_predecessor_knew(
    seed: int, mode: str, actions: int
) -> None:
    world = World(
        seed, 24, staleness__mode=mode, batch__size=2, window__keep_versions=2, feeder__max_outstanding_groups=6,
        group__on_stale="requeue", group__drop_zero_variance=True,
    )  # fmt: skip
    world.fails = lambda prompt, attempt: prompt % 5 == 0 and attempt == 0
    world.flat = lambda prompt: prompt % 4 == 1
    world.act(actions)
    effects: list[Event] = [*world.effects]
    verdicts = [effect for effect in effects if isinstance(effect, ev.Verdict)]
    batches = [effect for effect in effects if not isinstance(effect, ev.Verdict)]
    again = read_anyhow(random.Random(seed), [world.log, [*verdicts], batches])
    assert told(again) == told(world.admission)


def test_an_older_request_that_is_read_again_is_not_the_open_one() -> None:
    """Its batch stands in another topic and may not have been read yet."""
    state = AdmissionState(RUN)
    for event in (requested(1), requested(2), requested(1)):
        state.fold(event)
    assert state.open_request == requested(2).batch_id


def test_an_older_retry_that_is_read_again_does_not_take_the_place_of_the_newest() -> None:
    """The verdicts may be read ahead of the admissions; a retry that was forgotten would hold its group's place for ever."""
    state = AdmissionState(RUN)
    first, second = verdict(0, "retry"), verdict(0, "retry", attempt=1)
    for event in (first, second, first, admitted(0), admitted(0, 1)):
        state.fold(event)
    assert state.retries == {group_id(RUN, 0, 0): 2}
