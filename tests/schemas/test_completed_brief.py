"""A brief GroupCompleted says what the whole one says, or the whole one is given."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as ev
from schemas.codec import HEADER_SIZE, decode, encode
from schemas.completed_brief import CompletedBrief, decode_briefly
from schemas.errors import IncompatibleEvent, SchemaError, UnknownEvent

SMALL = st.text("abc0", max_size=64)
ANY = SMALL | st.text(max_size=70)
LONGS = st.integers(0, 2**63 - 1) | st.integers(-9000, 9000)


def facts(texts: st.SearchStrategy[str]) -> st.SearchStrategy[ev.TrajectoryFacts]:
    return st.builds(
        ev.TrajectoryFacts,
        parent_traj_id=texts, sample_index=LONGS, version=texts, versions=st.lists(texts, max_size=4).map(tuple),
        reward=st.none() | st.floats(), status=st.sampled_from(["completed", "truncated", "failed"]), reason=texts,
        segments=LONGS, sequences=LONGS, output_tokens=LONGS, context_tokens=LONGS, preemptions=LONGS,
        abandoned_segments=LONGS, tokens_digest=texts, started_at=LONGS, ended_at=LONGS,
    )  # fmt: skip


def groups(texts: st.SearchStrategy[str]) -> st.SearchStrategy[ev.GroupCompleted]:
    return st.builds(
        ev.GroupCompleted,
        event_id=ANY, run_id=ANY, kind=st.sampled_from(["train", "eval", "free"]), policy_id=ANY, occurred_at=LONGS,
        group_id=ANY, attempt=LONGS, payload=st.builds(ev.PayloadRef, ANY, ANY, LONGS, ANY), sequences=LONGS,
        trainable_tokens=LONGS, trajectories=st.lists(facts(texts), max_size=9).map(tuple),
    )  # fmt: skip


def usual(**changes: object) -> ev.TrajectoryFacts:
    whole = ev.TrajectoryFacts(
        "0123456789abcdef" * 2, 3, "v000001", ("v000001",), 0.5, "completed", "done", 8, 1, 1900, 148, 0, 0, "ab" * 32,
        1_800_000_000_000_000, 1_800_000_030_000_000,
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def group(*trajectories: ev.TrajectoryFacts) -> ev.GroupCompleted:
    payload = ev.PayloadRef("run/group/0/00", "00", 7, "group-arrow-v1")
    return ev.identified(
        ev.GroupCompleted(
            run_id="run", occurred_at=5, group_id="run-e0-p000001", attempt=0, payload=payload, sequences=8,
            trainable_tokens=9, trajectories=trajectories,
        )
    )  # fmt: skip


def agree(raw: bytes) -> None:
    """Whatever `decode_briefly` gives, `decode` gives as well."""
    given = decode_briefly(raw)
    whole = decode(raw)
    if not isinstance(given, CompletedBrief):
        assert repr(given) == repr(whole)
        return
    assert isinstance(whole, ev.GroupCompleted)
    for name in (
        "event_id",
        "run_id",
        "kind",
        "policy_id",
        "occurred_at",
        "group_id",
        "attempt",
        "payload",
        "sequences",
    ):
        assert getattr(given, name) == getattr(whole, name)
    assert given.trainable_tokens == whole.trainable_tokens
    assert given.labels == tuple(t.version for t in whole.trajectories)
    assert all(t.parent_traj_id for t in whole.trajectories)
    assert repr(given.whole()) == repr(whole)


@settings(max_examples=300, deadline=None)
@given(groups(SMALL) | groups(ANY))
def test_a_brief_event_says_what_the_whole_one_says(event: ev.GroupCompleted) -> None:
    agree(encode(event))


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 700), st.binary(max_size=6), st.integers(0, 6))
def test_damaged_bytes_give_a_brief_event_only_where_the_whole_one_can_be_read(
    at: int, junk: bytes, cut: int
) -> None:
    raw = encode(
        group(usual(), usual(version="v2", versions=("v1", "v2")), usual(reward=None, status="failed"))
    )
    at = HEADER_SIZE + at % (len(raw) - HEADER_SIZE)
    damaged = raw[:at] + junk + raw[at + cut :]
    try:
        agree(damaged)
    except SchemaError as wrong:
        with pytest.raises(type(wrong)):
            decode(damaged)


@pytest.mark.parametrize("versions", [("v1",) * 8, ("v1", "v2"), ("", "v1"), ("v1",)])
def test_usual_groups_are_brief(versions: tuple[str, ...]) -> None:
    brief = decode_briefly(encode(group(*(usual(version=version) for version in versions))))
    assert isinstance(brief, CompletedBrief)
    assert brief.labels == versions


@pytest.mark.parametrize(
    "changes",
    [
        {"parent_traj_id": ""},  # it has no say (W6), and the labels alone would not show it
        {"reason": "é"},
        {"reason": "x" * 65},
        {"versions": ("a", "b", "c", "d")},
        {"output_tokens": 2**63 - 1},
    ],
)
def test_what_is_unusual_is_read_whole(changes: dict[str, object]) -> None:
    event = group(usual(), usual(**changes))
    assert decode_briefly(encode(event)) == event


def test_text_that_is_no_unicode_is_incompatible_briefly_too() -> None:
    raw = encode(group(usual())).replace(b"\x08done", b"\x08do\xff\xff")
    with pytest.raises(IncompatibleEvent):
        decode_briefly(raw)


def test_other_events_are_read_as_ever() -> None:
    event = ev.identified(ev.RunEnded(run_id="r", occurred_at=1, reason="done"))
    assert decode_briefly(encode(event)) == event
    with pytest.raises(UnknownEvent):
        decode_briefly(b"\xc3\x01" + bytes(12))
