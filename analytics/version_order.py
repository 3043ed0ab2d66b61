"""The version window once more, in the fewest words: each label has a place in the log, the newest N places are live.

Written apart from `schemas.window`, which the controller uses: the invariants compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.versions import real_version
from schemas.window import WindowOrder

Spot = tuple[int, int]  # offset in control.v1, rank within the record


class VersionOrder:
    """Labels by place: where they were published, or else first observed (`observed`: the observation alone)."""

    def __init__(self, keep_versions: int, order: WindowOrder) -> None:
        self.keep_versions = keep_versions
        self._published_counts = order == "published"
        self._published: dict[str, Spot] = {}
        self._observed: dict[str, Spot] = {}

    def publish(self, label: str, offset: int) -> None:
        """A `PolicyPublished` at this offset."""
        real = real_version(label)
        if real is not None and self._published_counts:
            self._published.setdefault(real, (offset, 0))

    def observe(self, labels: Iterable[str], offset: int) -> None:
        """Versions of a group's trajectories, in their order."""
        for rank, label in enumerate(labels):
            real = real_version(label)
            if real is not None:
                self._observed.setdefault(real, (offset, rank))

    def labels(self) -> list[str]:
        """Oldest first."""
        places = self._observed | self._published
        return sorted(places, key=lambda label: places[label])

    def current(self) -> str:
        """The newest label, "" with none."""
        labels = self.labels()
        return labels[-1] if labels else ""

    def live(self) -> tuple[str, ...]:
        """Labels inside the window; all of them when it is off."""
        labels = self.labels()
        return tuple(labels[-self.keep_versions :] if self.keep_versions else labels)
