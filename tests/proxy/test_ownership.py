"""Claims of other replicas: an answer leaves exactly when its record counts in the log, and nothing is read without need."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.producer import Position
from proxy.ownership import Frontier, Ownership, SeenClaim, SessionTaken
from schemas.errors import PublishTimeout, TransportError


class LogFollower:
    """Hands over what a list says the partition holds: None is our own record, a number is another's claim."""

    def __init__(self, records: list[int | None]) -> None:
        self.records = records
        self.starts: list[Mapping[int, int]] = []
        self.ownership: Ownership | None = None
        self.silent = False

    def start(self, offsets: Mapping[int, int]) -> None:
        self.starts.append(offsets)
        if not self.silent:
            asyncio.get_running_loop().call_soon(self.report, offsets[0])

    def report(self, start: int) -> None:
        assert self.ownership is not None
        seen = [
            SeenClaim(0, at, "s", e) for at, e in enumerate(self.records) if e is not None and at >= start
        ]
        self.ownership.saw({0: len(self.records)}, seen)

    async def stop(self) -> None:
        pass


def owner(records: list[int | None], start: int = 0, timeout_s: float = 5.0) -> tuple[Ownership, LogFollower]:
    follower = LogFollower(records)
    ownership = Ownership(lambda: 1000, timeout_s)
    ownership.begin({0: start}, 0, follower)
    follower.ownership = ownership
    return ownership, follower


@given(st.lists(st.one_of(st.none(), st.integers(0, 2_000_000)), min_size=1, max_size=12))
def test_a_record_counts_unless_a_higher_claim_stands_before_it(records: list[int | None]) -> None:
    async def law() -> None:
        ownership, _ = owner(records)
        holding = ownership.hold("s")
        for offset, claim in enumerate(records):
            if claim is not None:
                continue
            ownership.wrote(Position(0, offset))
            void = any(e is not None and e > holding.epoch for e in records[:offset])
            if void:
                with pytest.raises(SessionTaken):
                    await ownership.check(holding, Position(0, offset))
            else:
                await ownership.check(holding, Position(0, offset))

    asyncio.run(law())


async def test_alone_nothing_is_read() -> None:
    ownership, follower = owner([None] * 50, start=3)
    holding = ownership.hold("s")
    for offset in range(3, 50):
        ownership.wrote(Position(0, offset))
        await ownership.check(holding, Position(0, offset))
    assert follower.starts == []


async def test_a_gap_is_read_once_from_where_knowledge_ends() -> None:
    ownership, follower = owner([None, None, 5, None])
    holding = ownership.hold("s")
    for offset in (0, 1, 3):
        ownership.wrote(Position(0, offset))
        await ownership.check(holding, Position(0, offset))  # 5 is lower than ours
    assert follower.starts == [{0: 2}]


async def test_a_log_that_cannot_be_read_is_an_unknown_outcome() -> None:
    ownership, follower = owner([7, None], timeout_s=0.05)
    follower.silent = True
    with pytest.raises(PublishTimeout):
        await ownership.check(ownership.hold("s"), Position(0, 1))
    checking = asyncio.ensure_future(ownership.check(ownership.hold("t"), Position(0, 1)))
    await asyncio.sleep(0)
    ownership.broke(TransportError("gone"))
    with pytest.raises(PublishTimeout):
        await checking


def test_epochs_rise_above_everything_that_is_known() -> None:
    ownership = Ownership(lambda: 1000, 1.0)
    ownership.begin(
        {0: 0}, 50, LogFollower([])
    )  # a predecessor's clock was ahead: its newest record is of 50 ms
    first, second = ownership.hold("s"), ownership.hold("t")
    assert 50_999 < first.epoch < second.epoch
    ownership.saw({0: 1}, [SeenClaim(0, 0, "u", 90_000)])
    assert ownership.hold("s", known=95_000).epoch > 95_000


def test_a_new_claim_of_ours_ends_the_old_one_from_its_place_on() -> None:
    ownership = Ownership(lambda: 1000, 1.0)
    old = ownership.hold("s")
    new = ownership.hold("s")
    assert not old.usable
    assert old.covers(10**9)
    ownership.claimed(new, Position(0, 7))
    assert old.covers(6)
    assert not old.covers(7)
    assert new.covers(10**9)


def test_nothing_is_kept_of_a_claim_that_nobody_holds() -> None:
    ownership = Ownership(lambda: 1000, 1.0)
    for number in range(100):
        ownership.claimed(ownership.hold(f"s{number}"), Position(0, number))
    gc.collect()
    assert len(ownership._held) == 0


@given(st.permutations(range(8)), st.integers(0, 8))
def test_a_frontier_ends_where_the_first_unknown_record_stands(order: list[int], seen: int) -> None:
    frontier, own = Frontier(0), set(range(seen))
    frontier.saw(seen)
    for offset in order:
        frontier.wrote(offset)
        own.add(offset)
        assert frontier.next == next(n for n in range(10) if n not in own)
    assert not frontier._own
