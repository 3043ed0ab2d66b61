"""Laws of the fold over generated logs: determinism, crashes, repetitions, one fate per group, conservation."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from control_log import RUN, configured, folded, logs, published, run_fold
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as ev
from schemas.codec import encode
from schemas.completed_brief import decode_briefly
from schemas.errors import CorruptPayload
from schemas.events import Effect, Event
from streams.control_fold import fold
from streams.control_state import ControlState


def encoded(effects: list[Effect]) -> list[bytes]:
    return [encode(effect) for effect in effects]


@settings(max_examples=150, deadline=None)
@given(logs(), st.data())
def test_a_crash_after_any_record_changes_nothing(log: list[Event], data: st.DataObject) -> None:
    whole = ControlState(RUN)
    expected = encoded(run_fold(*log, state=whole))
    cut = data.draw(st.integers(0, len(log)))
    before = ControlState(RUN)
    effects = folded(list(enumerate(log))[:cut], before)
    after = ControlState.from_bytes(before.to_bytes())
    effects += folded(list(enumerate(log))[cut:], after)
    assert encoded(effects) == expected
    assert after.to_bytes() == whole.to_bytes()


@settings(max_examples=150, deadline=None)
@given(logs(), st.data())
def test_records_that_are_read_again_change_nothing(log: list[Event], data: st.DataObject) -> None:
    places = list(enumerate(log))
    again = data.draw(st.lists(st.integers(1, len(log)), max_size=4))
    stuttering = [place for cut in again for place in places[:cut]] + places
    first = [stuttering[0]]
    for place in stuttering[1:]:
        if place[0] <= first[-1][0] + 1:
            first.append(place)
    assert encoded(folded(first)) == encoded(folded(places))


@settings(max_examples=150, deadline=None)
@given(logs(), st.data())
def test_facts_that_are_written_again_change_nothing(log: list[Event], data: st.DataObject) -> None:
    repeated: list[tuple[int, Event]] = []
    for place, event in enumerate(log):
        repeated.append((place, event))
        earlier = data.draw(st.lists(st.integers(0, place), max_size=2))
        repeated += [(index, log[index]) for index in earlier]
    effects = folded([(offset, event) for offset, (_, event) in enumerate(repeated)])
    origin = {offset: index for offset, (index, _) in enumerate(repeated)}
    renumbered = [msgspec.structs.replace(e, cause_offset=origin[e.cause_offset]) for e in effects]
    assert encoded(renumbered) == encoded(run_fold(*log))


RULES: tuple[dict[str, object] | None, ...] = (
    None,  # those of the log
    {},  # none that looks at a trajectory's facts: the brief is all that is read
    {"group__min_live_trajectories": 2},
    {"group__drop_zero_variance": True},
    {"group__filter": "control_log:keeps_odd_lengths"},
    {"retry__policy": "budget", "retry__share": 0.1},
)


@settings(max_examples=300, deadline=None)
@given(logs(), st.sampled_from(RULES), st.integers(0, 2))
def test_brief_events_change_the_state_and_cause_effects_as_whole_ones_do(
    log: list[Event], rule: dict[str, object] | None, keep: int
) -> None:
    if rule is not None:
        log = [configured(window__keep_versions=keep, batch__size=2, **rule), *log[1:]]
    whole, brief = ControlState(RUN), ControlState(RUN)
    expected = run_fold(*log, state=whole)
    effects = [
        effect
        for offset, event in enumerate(log)
        for effect in fold(brief, offset, decode_briefly(encode(event)))
    ]
    assert encoded(effects) == encoded(expected)
    assert brief.to_bytes() == whole.to_bytes()


@settings(max_examples=200, deadline=None)
@given(logs())
def test_one_fate_per_group_and_none_is_lost(log: list[Event]) -> None:
    state = ControlState(RUN)
    effects = run_fold(*log, state=state)
    verdicts = [e for e in effects if isinstance(e, ev.Verdict)]
    terminal = Counter(v.group_id for v in verdicts if v.outcome != "retry")
    assert all(count == 1 for count in terminal.values())
    assert max(Counter((v.group_id, v.attempt) for v in verdicts).values(), default=1) == 1
    admitted = {e.group_id for e in log if isinstance(e, ev.GroupAdmitted)}
    open_groups = set(state.running) | set(state.retrying) | set(state.pending)
    assert admitted == set(terminal) | open_groups
    assert not set(terminal) & open_groups
    assert state.open_groups == len(open_groups)
    assert state.pending_sequences == sum(p.group.sequences for p in state.pending.values())
    if state.end_reason is not None:
        assert not open_groups


@settings(max_examples=200, deadline=None)
@given(logs())
def test_no_batch_holds_a_group_outside_the_window_or_a_group_twice(log: list[Event]) -> None:
    state = ControlState(RUN)
    ids: list[str] = []
    trained: list[str] = []
    for offset, event in enumerate(log):
        for effect in fold(state, offset, event):
            if not isinstance(effect, ev.TrainBatch):
                continue
            ids.append(effect.batch_id)
            trained += [group.group_id for group in effect.groups]
            for group in effect.groups:
                assert not state.window.judge(group.versions).stale
                if state.window.keep_versions:
                    assert {v for v in group.versions if v} <= set(effect.window)
    assert len(ids) == len(set(ids))
    assert len(trained) == len(set(trained))


@settings(max_examples=100, deadline=None)
@given(logs())
def test_effects_carry_their_cause_and_their_place(log: list[Event]) -> None:
    for offset, event in enumerate(log):
        state = ControlState(RUN)
        effects = [e for e in folded(list(enumerate(log))[: offset + 1], state) if e.cause_offset == offset]
        assert [e.index for e in effects] == list(range(len(effects)))
        assert all(e.occurred_at == event.occurred_at for e in effects)


def test_every_snapshot_of_one_state_has_the_same_bytes_and_a_damaged_one_is_refused() -> None:
    state = ControlState(RUN)
    run_fold(configured(), published("v1"), state=state)
    raw = state.to_bytes()
    assert ControlState.from_bytes(raw).to_bytes() == raw
    assert state.digest() == raw[:32].hex()
    with pytest.raises(CorruptPayload):
        ControlState.from_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptPayload):
        ControlState.from_bytes(b"short")
