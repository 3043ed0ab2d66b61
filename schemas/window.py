"""Rules 2 and 3: the order of versions and the version window over groups.

`keep_versions = N` keeps the last N versions (0: off); cutoff = max(0, n - N). A group is stale if any of its versioned
trajectories is older than the cutoff. Order `published`: a label stands where it was published, or where it was first
observed as long as nobody published it. Order `observed`: first observation alone (the plain Dressage rule, wrong when
an old version is first seen late: it then counts as newest). Such late sightings are counted in both orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from schemas.errors import ConfigError
from schemas.versions import real_version

WindowOrder = Literal["published", "observed"]


class WindowFacts(msgspec.Struct, frozen=True):
    """What the window said about one group: indices into the order of versions, and gaps to the current one."""

    stale: bool
    current_index: int
    cutoff_index: int
    gaps: tuple[int, ...]

    @property
    def gap_mean(self) -> float:
        """Mean gap over the versioned trajectories; 0 with none."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0


class VersionWindow:
    """The versions of one policy in order, and the judgement of groups against the last `keep_versions` of them."""

    def __init__(self, keep_versions: int, order: WindowOrder = "published") -> None:
        if not isinstance(keep_versions, int) or isinstance(keep_versions, bool) or keep_versions < 0:
            raise ConfigError("keep_versions must be a whole number >= 0", keep_versions=repr(keep_versions))
        if order not in ("published", "observed"):
            raise ConfigError("window.order is published or observed", order=repr(order))
        self.keep_versions = keep_versions
        self.order: WindowOrder = order
        self.labels: list[str] = []
        self.published: list[str] = []
        self.observed: set[str] = set()
        self.late_sightings = 0

    def publish(self, label: object) -> bool:
        """A `PolicyPublished` was read; True if the window advanced. Only the first publication of a label counts."""
        real = real_version(label)
        if real is None or real in self.published:
            return False
        self.published.append(real)
        if self.order == "observed":
            return False
        if real in self.labels:
            self.labels.remove(real)
        self.labels.append(real)
        return True

    def observe(self, labels: Iterable[object]) -> bool:
        """Versions of a completed or failed group were read; True if the window advanced."""
        advanced = False
        for label in labels:
            real = real_version(label)
            if real is None or real in self.observed:
                continue
            self.late_sightings += self._is_late(real)
            self.observed.add(real)
            if real not in self.labels:
                self.labels.append(real)
                advanced = True
        return advanced

    def _is_late(self, label: str) -> bool:
        """Whether a label published later than this one was observed before it."""
        if label not in self.published:
            return False
        newer = self.published[self.published.index(label) + 1 :]
        return any(other in self.observed for other in newer)

    @property
    def current_index(self) -> int:
        """Index of the newest version; -1 with none."""
        return len(self.labels) - 1

    @property
    def cutoff_index(self) -> int:
        """Oldest index that is kept; 0 when the window is off."""
        return max(0, len(self.labels) - self.keep_versions) if self.keep_versions else 0

    def index(self, label: object) -> int | None:
        """Place of a real label in the order, None if unreal or never seen."""
        real = real_version(label)
        return self.labels.index(real) if real is not None and real in self.labels else None

    def judge(self, trajectory_versions: Sequence[object]) -> WindowFacts:
        """Judge one group by the versions of its trajectories; those without a real version have no say."""
        places = [i for i in map(self.index, trajectory_versions) if i is not None]
        stale = self.keep_versions > 0 and any(i < self.cutoff_index for i in places)
        return WindowFacts(
            stale, self.current_index, self.cutoff_index, tuple(self.current_index - i for i in places)
        )
