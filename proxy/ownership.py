"""Who owns a session in the log: no answer leaves under a claim that another replica had overtaken (docs/adr/0008).

A record of a session is void where a claim of a higher epoch stands before it in the partition. So after the
acknowledgement of offset o the answer may leave if everything below o is known to hold no such claim. Our own records are
known; without another replica the offsets of a partition are ours without a gap, and nothing has to be asked. A gap is
somebody else's record: then the partitions are followed, and the answer waits until the follower has passed it.

Invariants: everything at and above the offsets of the start is known up to `Frontier.next`; the epochs that a process
gives out rise, and lie above every claim that it knows of and above the newest record that stood in the log at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from journal.clock import Clock
from journal.producer import Position
from schemas.errors import PublishTimeout, SessionConflict, TransportError

_QUIET_S = 30.0
"""After so long without a gap nobody else writes any more: the follower ends."""
_US_PER_MS = 1000


class SessionTaken(SessionConflict):
    """Another replica claimed the session first: what was written is void. The same call again finds the session."""


class SeenClaim(NamedTuple):
    """A claim that stands in the log."""

    partition: int
    offset: int
    session_id: str
    epoch: int


class Follower(Protocol):
    """Reads the segments topic from given offsets and reports to `Ownership.saw`."""

    def start(self, offsets: Mapping[int, int]) -> None: ...

    async def stop(self) -> None: ...


class Holding:
    """A claim of ours. `over_at`: where a higher one stands in the log; `usable`: whether more may be written under it."""

    __slots__ = ("__weakref__", "epoch", "over_at", "predecessor", "session_id", "usable")

    def __init__(self, session_id: str, epoch: int, predecessor: Holding | None = None) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self.over_at: int | None = None
        self.usable = True
        self.predecessor = predecessor

    def end(self, offset: int) -> None:
        """A higher claim stands there."""
        self.over_at = offset if self.over_at is None else min(self.over_at, offset)
        self.usable = False

    def covers(self, offset: int) -> bool:
        """Whether a record of this claim at this offset counts."""
        return self.over_at is None or offset < self.over_at


class Frontier:
    """How much of one partition is known without a gap: everything below `next`. Pure."""

    def __init__(self, start: int) -> None:
        self.next = start
        self._own: set[int] = set()

    def wrote(self, offset: int) -> None:
        """A record of ours stands there."""
        if offset >= self.next:
            self._own.add(offset)
            self._advance()

    def saw(self, end: int) -> None:
        """Everything below `end` was read."""
        if end > self.next:
            self.next = end
            self._own = {offset for offset in self._own if offset >= end}
            self._advance()

    def _advance(self) -> None:
        while self.next in self._own:
            self._own.remove(self.next)
            self.next += 1


def _nobody(_session_id: str) -> None:
    pass


class Ownership:
    """The claims of this process. One event loop uses it. `lost`: told of a session when another replica's claim is seen."""

    def __init__(self, clock: Clock, timeout_s: float, lost: Callable[[str], None] = _nobody) -> None:
        self._lost = lost
        self._clock = clock
        self._timeout_s = timeout_s
        self._floor = 0
        self._held: WeakValueDictionary[str, Holding] = WeakValueDictionary()
        self._frontiers: dict[int, Frontier] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._follower: Follower | None = None
        self._follows = False
        self._needed_at = 0

    def begin(self, ends: Mapping[int, int], newest_ms: int, follower: Follower) -> None:
        """`ends`: the end offsets of the segments topic now; `newest_ms`: the time of its newest record."""
        self._frontiers = {partition: Frontier(end) for partition, end in ends.items()}
        self._floor = max(self._floor, (newest_ms + 1) * _US_PER_MS)
        self._follower = follower

    @property
    def follows(self) -> bool:
        """Whether somebody else writes, too, so that the log is followed."""
        return self._follows

    def hold(self, session_id: str, known: int = 0) -> Holding:
        """A new claim to write, above `known` and everything else; an older one of ours is over."""
        old = self._held.get(session_id)
        if old is not None:
            known = max(known, old.epoch)
            old.usable = False
        self._floor = max(self._clock(), known + 1, self._floor + 1)
        holding = self._held[session_id] = Holding(session_id, self._floor, old)
        return holding

    def claimed(self, holding: Holding, position: Position) -> None:
        """The claim stands in the log."""
        if holding.predecessor is not None:
            holding.predecessor.end(position.offset)
            holding.predecessor = None

    def wrote(self, position: Position) -> None:
        """A record of ours was acknowledged."""
        frontier = self._frontiers.get(position.partition)
        if frontier is not None:
            frontier.wrote(position.offset)

    async def check(self, holding: Holding, position: Position) -> None:
        """Return if the record counts. SessionTaken: it is void. PublishTimeout: what stands before it cannot be read."""
        if not self._is_known(position):
            await self._until_known(position)
        if not holding.covers(position.offset):
            raise SessionTaken("another proxy claimed the session", session_id=holding.session_id)

    def saw(self, ends: Mapping[int, int], claims: Iterable[SeenClaim]) -> None:
        """The follower has read everything below `ends`, and these claims in it."""
        for claim in claims:
            self._floor = max(self._floor, claim.epoch)
            holding = self._held.get(claim.session_id)
            if holding is not None and claim.epoch > holding.epoch:
                holding.end(claim.offset)
                self._lost(claim.session_id)
        for partition, end in ends.items():
            self._frontiers.setdefault(partition, Frontier(end)).saw(end)
        self._wake(None)

    def broke(self, failure: TransportError) -> None:
        """The follower cannot read; the next record starts another."""
        self._follows = False
        self._wake(failure)

    async def rest(self) -> None:
        """End a follower that was of no use for a while."""
        if self._follows and self._clock() - self._needed_at > _QUIET_S * 1e6:
            await self.stop()

    async def stop(self) -> None:
        """End the follower."""
        follows, self._follows = self._follows, False
        if follows and self._follower is not None:
            await self._follower.stop()

    def _is_known(self, position: Position) -> bool:
        frontier = self._frontiers.get(position.partition)
        return frontier is not None and frontier.next >= position.offset

    async def _until_known(self, position: Position) -> None:
        self._needed_at = self._clock()
        self._follow()
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._is_known(position):
                    await self._next_news()
        except (TimeoutError, TransportError) as away:
            raise PublishTimeout(
                "the log could not be read up to the record", partition=position.partition
            ) from away

    async def _next_news(self) -> None:
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        try:
            await news
        finally:
            self._waiting.discard(news)

    def _follow(self) -> None:
        if not self._follows and self._follower is not None:
            self._follows = True
            self._follower.start({partition: f.next for partition, f in self._frontiers.items()})

    def _wake(self, failure: TransportError | None) -> None:
        for news in self._waiting:
            if news.done():
                continue
            if failure is None:
                news.set_result(None)
            else:
                news.set_exception(failure)
