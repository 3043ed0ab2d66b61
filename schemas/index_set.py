"""Sets of small integers, and of groups, that stay small: runs of neighbours are kept as intervals.

A run of any length remembers which of its groups have ended and which prompts were admitted. Both are dense (a pass over the
dataset that is done is one interval), so that memory follows what is open, not what ever was.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cache, lru_cache

import msgspec


class IndexSet(msgspec.Struct):
    """`bounds`: start, stop, start, stop, … of disjoint half-open intervals that do not touch."""

    bounds: list[int] = []

    def add(self, index: int) -> None:
        """Adding twice changes nothing."""
        bounds = self.bounds
        place = bisect_right(bounds, index)
        if place & 1:
            return
        touches_left = place > 0 and bounds[place - 1] == index
        touches_right = place < len(bounds) and bounds[place] == index + 1
        if touches_left and touches_right:
            del bounds[place - 1 : place + 1]
        elif touches_left:
            bounds[place - 1] = index + 1
        elif touches_right:
            bounds[place] = index
        else:
            bounds[place:place] = [index, index + 1]

    def __contains__(self, index: int) -> bool:
        return bool(bisect_right(self.bounds, index) & 1)

    def __len__(self) -> int:
        return sum(self.bounds[1::2]) - sum(self.bounds[::2])


class GroupSet(msgspec.Struct):
    """Groups of one run. Those with our own names are known by pass and prompt, others by name."""

    run_id: str
    passes: dict[int, IndexSet] = {}
    others: dict[str, None] = {}

    def add(self, group: str) -> None:
        """Adding twice changes nothing."""
        place = _place(self.run_id, group)
        if place is None:
            self.others[group] = None
            return
        known = self.passes.get(place[0])
        if known is None:
            known = self.passes[place[0]] = IndexSet()
        known.add(place[1])

    def __contains__(self, group: str) -> bool:
        place = _place(self.run_id, group)
        if place is None:
            return group in self.others
        known = self.passes.get(place[0])
        return known is not None and place[1] in known

    def __len__(self) -> int:
        return sum(map(len, self.passes.values())) + len(self.others)


@lru_cache(maxsize=16_384)  # an open group is asked about with each of its events
def _place(run_id: str, group: str) -> tuple[int, int] | None:
    """Pass and prompt of a name that `ids.group_id` gives; None: of any other."""
    found = _pattern(run_id).fullmatch(group)
    return (int(found[1]), int(found[2])) if found is not None else None


@cache
def _pattern(run_id: str) -> re.Pattern[str]:
    """Exactly the names that `ids.group_id` gives, so that each is one pass and prompt and the other way round."""
    return re.compile(re.escape(run_id) + "-e(0|[1-9][0-9]*)-p([0-9]{6}|[1-9][0-9]{6,})")
