"""Compact sets: the same as plain ones, and small where what is in them is dense."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import index_set
from schemas.ids import group_id
from schemas.index_set import GroupSet, IndexSet
from streams.assembly_closed import Attempt, ClosedAttempts


@given(st.lists(st.integers(0, 40)))
def test_a_set_of_indices_is_a_set(indices: list[int]) -> None:
    compact, plain = IndexSet(), set()
    for index in indices:
        compact.add(index)
        plain.add(index)
        assert len(compact) == len(plain)
    assert [index in compact for index in range(42)] == [index in plain for index in range(42)]
    pairs = list(zip(compact.bounds[::2], compact.bounds[1::2], strict=True))
    assert all(start < stop for start, stop in pairs)
    assert all(before[1] < after[0] for before, after in pairwise(pairs))


def test_a_pass_that_is_done_is_one_interval_whatever_the_order() -> None:
    indices = list(range(5000))
    random.Random(0).shuffle(indices)
    compact = IndexSet()
    for index in indices:
        compact.add(index)
    assert compact.bounds == [0, 5000]


_NAMES = st.one_of(
    st.builds(group_id, st.just("r"), st.integers(0, 2), st.integers(0, 5)),
    st.sampled_from(["g", "r-e0-p1", "r-e00-p000001", "r-e1-p0000012", "x-e0-p000001", "r-e0-p٠٠٠٠٠١", "r-e0-p1000000", ""]),
)  # fmt: skip


@given(st.lists(_NAMES), st.lists(_NAMES))
def test_a_set_of_groups_is_a_set_whatever_they_are_called(groups: list[str], asked: list[str]) -> None:
    compact = GroupSet("r")
    for group in groups:
        compact.add(group)
    assert len(compact) == len(set(groups))
    assert [group in compact for group in asked] == [group in set(groups) for group in asked]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(compact), type=GroupSet) == compact


@pytest.mark.parametrize(("epoch", "prompt"), [(0, 0), (12, 999_999), (3, 1_000_000), (0, 123_456_789)])
def test_our_own_names_are_kept_as_numbers(epoch: int, prompt: int) -> None:
    compact = GroupSet("a.b")
    compact.add(group_id("a.b", epoch, prompt))
    assert compact.others == {}
    assert compact.passes[epoch].bounds == [prompt, prompt + 1]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=30), st.booleans())
def test_a_verdict_closes_the_attempts_before_it_and_an_end_its_own_alone(
    closings: list[tuple[int, int, bool]], ours: bool
) -> None:
    def name(group: int) -> str:
        return group_id("run", 0, group) if ours else f"somebody-{group}"

    closed = ClosedAttempts("run")
    expected = set[tuple[int, int]]()
    for group, number, decided in closings:
        (closed.decide if decided else closed.add)(Attempt(name(group), number))
        expected |= {(group, before) for before in range(number + 1)} if decided else {(group, number)}
    for group in range(8):
        for number in range(5):
            assert (Attempt(name(group), number) in closed) == ((group, number) in expected)


def test_closed_attempts_of_a_long_run_take_no_more_room_than_those_of_a_short_one() -> None:
    def room(groups: int) -> int:
        tracemalloc.start()
        closed = ClosedAttempts("run")
        for index in range(groups):
            closed.add(Attempt(group_id("run", 0, index), 0))
        index_set._place.cache_clear()  # bounded, whatever the length
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    # a name kept for each would be 150 bytes a group
    assert room(30_000) - room(10_000) < 20 * 20_000
