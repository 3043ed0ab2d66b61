from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout.low_water import LowWater


def test_nothing_to_commit_at_the_start() -> None:
    assert LowWater().advance() is None


def test_a_finished_group_behind_an_open_one_does_not_move_the_mark() -> None:
    water = LowWater()
    water.begin(5)
    water.begin(6)
    water.finish(6)
    assert water.advance() == 5
    water.finish(5)
    assert water.advance() == 7
    assert water.advance() is None


@given(
    st.integers(1, 30).flatmap(lambda n: st.permutations(range(n)).map(lambda p: (n, p))), st.integers(0, 30)
)
def test_the_mark_never_passes_an_open_record(orders: tuple[int, list[int]], done: int) -> None:
    count, order = orders
    water = LowWater()
    for offset in range(count):
        water.begin(offset)
    for offset in order[:done]:
        water.finish(offset)
    still_open = set(range(count)) - set(order[:done])
    assert water.mark == min(still_open, default=count)
