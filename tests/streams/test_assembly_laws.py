"""Laws over orders, repetitions and crashes: the same group comes out, once, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable

from assembler_runs import completed, feed, flat, fresh
from assembler_sessions import Session, group
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as ev
from streams.assembly import Completed, apply, confirm, low_water
from streams.assembly_closed import Attempt, ClosedAttempts
from streams.group_payload import group_payload

SIZE = 3


def chain(sample: int) -> list[list[ev.Event]]:
    claim, start, *rest = Session(sample=sample).whole()
    return [[claim], [start], rest]


def rewarded_later(sample: int) -> list[list[ev.Event]]:
    s = Session(sample=sample)
    return [[s.claim()], [s.segment(0, [1], [2]), s.end(1, reward=None, pending=True)], [s.reward(0.5)]]


def taken_over(sample: int) -> list[list[ev.Event]]:
    """Another replica claims: what the first one still writes is void."""
    old, new = Session(sample=sample), Session(sample=sample)
    return [
        [old.claim(1)], [old.start()],
        [old.segment(0, [1], [2])], [new.claim(2)],
        [old.segment(1, [7], [7], parent=0), old.end(2), new.segment(1, [3], [4], parent=0), new.end(2)],
    ]  # fmt: skip


def begun_again(sample: int) -> list[list[ev.Event]]:
    """The worker tries the trajectory again from scratch."""
    old, new = Session(sample=sample), Session(sample=sample)
    return [
        [old.claim(1)], [old.segment(0, [1], [2]), old.reward(7.0)], [new.claim(2, restart=True)],
        [new.segment(0, [1], [9]), new.segment(1, [3], [4], parent=0, branch=1, lineage="b"), new.end(2)],
    ]  # fmt: skip


Story = Callable[[int], list[list[ev.Event]]]
STORIES: tuple[Story, ...] = (chain, rewarded_later, taken_over, begun_again)


def mix(sessions: list[list[list[ev.Event]]], rng: random.Random, repetitions: int) -> list[ev.Event]:
    """Another order across sessions and between claims, with records that come again later."""
    queues = [flat(rng.sample(stage, len(stage)) for stage in session) for session in sessions]
    mixed: list[ev.Event] = []
    while any(queues):
        mixed.append(rng.choice([queue for queue in queues if queue]).pop(0))
    for _ in range(repetitions):
        at = rng.randrange(len(mixed))
        mixed.insert(rng.randint(at + 1, len(mixed)), mixed[at])
    return mixed


@given(
    st.lists(st.sampled_from(STORIES), min_size=SIZE, max_size=SIZE),
    st.integers(0, 2**32),
    st.integers(0, 12),
)
@settings(max_examples=400, deadline=None)
def test_order_across_sessions_and_repetitions_change_nothing(
    stories: list[Story], seed: int, repetitions: int
) -> None:
    sessions = [story(sample) for sample, story in enumerate(stories)]
    plain = [event for session in sessions for event in flat(session)]
    one = completed(feed(fresh(SIZE), plain))
    other = completed(feed(fresh(SIZE), mix(sessions, random.Random(seed), repetitions)))
    assert one.trajectories == other.trajectories
    assert one.occurred_at == other.occurred_at
    assert bytes(group_payload(one.sequences)) == bytes(group_payload(other.sequences))


@given(st.integers(0, 2**32), st.integers(0, 60), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_a_crash_anywhere_loses_no_group_and_changes_none(seed: int, cut: int, acknowledged: float) -> None:
    """Killed behind `cut` records with some of the completions in the log; the next one starts from the mark."""
    rng = random.Random(seed)
    queues = [list(session) for name in ("a", "b", "c") for session in group(name, 2)]
    log: list[ev.Event] = []
    while any(queues):
        log.append(rng.choice([queue for queue in queues if queue]).pop(0))
    expected = {e.attempt: e for e in feed(fresh(2), log) if isinstance(e, Completed)}

    first, in_the_log = fresh(2), ClosedAttempts("run")
    for effect in feed(first, log[:cut]):
        assert isinstance(effect, Completed)
        if rng.random() < acknowledged:
            confirm(first, effect.attempt)
            in_the_log.add(effect.attempt)
    missing = {attempt for attempt in expected if attempt not in in_the_log}
    mark = low_water(first) or 0
    again = [e for e in feed(fresh(2, closed=in_the_log), log[mark:], start=mark) if isinstance(e, Completed)]

    assert {e.attempt for e in again} == missing
    for effect in again:
        assert effect.trajectories == expected[effect.attempt].trajectories
        assert bytes(group_payload(effect.sequences)) == bytes(
            group_payload(expected[effect.attempt].sequences)
        )


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_mark_never_passes_an_open_group_or_what_is_unconfirmed(seed: int) -> None:
    rng = random.Random(seed)
    queues = [list(session) for name in ("a", "b", "c", "d") for session in group(name, 2)]
    state, firsts, last = fresh(2), {}, 0
    for offset in range(sum(map(len, queues))):
        event = rng.choice([queue for queue in queues if queue]).pop(0)
        assert isinstance(event, ev.SessionEvent)
        firsts.setdefault(Attempt(str(event.group_id), 0), offset)
        apply(state, offset, event)
        done = [a for a in firsts if a in state.closed and a in state.unconfirmed]
        if done and rng.random() < 0.5:
            confirm(state, done[0])
            del firsts[done[0]]
        mark = low_water(state)
        assert mark == min([offset + 1, *firsts.values()])
        assert mark >= last
        last = mark


def test_a_record_below_the_next_offset_was_handled_already() -> None:
    state = fresh(1)
    events = flat(group(size=1))
    completed(feed(state, events))
    assert feed(state, events) == []
    assert sum(state.counts.values()) == len(events)
