"""Rules 2 and 3: the order of versions and the version window over groups.

`keep_versions = N` keeps the last N versions (0: off); cutoff = max(0, n - N). A group is stale if any of its versioned
trajectories is older than the cutoff. Order `published`: a label stands where it was published, or where it was first
observed as long as nobody published it. Order `observed`: first observation alone (the plain Dressage rule, wrong when
an old version is first seen late: it then counts as newest). Such late sightings are counted in both orders.

The window is a struct, so that a snapshot of the fold that owns it needs no second form of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
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


class VersionWindow(msgspec.Struct):
    """The versions of one policy in order, and the judgement of groups against the last `keep_versions` of them.

    `labels`: the order. `places`: index of each label in it. `published`, `observed`: label to its rank in that sequence.
    `newest_observed`: highest published rank of an observed label.
    """

    keep_versions: int
    order: WindowOrder = "published"
    labels: list[str] = []
    places: dict[str, int] = {}
    published: dict[str, int] = {}
    observed: dict[str, int] = {}
    newest_observed: int = -1
    late_sightings: int = 0

    def __post_init__(self) -> None:
        if (
            not isinstance(self.keep_versions, int)
            or isinstance(self.keep_versions, bool)
            or self.keep_versions < 0
        ):
            raise ConfigError(
                "keep_versions must be a whole number >= 0", keep_versions=repr(self.keep_versions)
            )
        if self.order not in ("published", "observed"):
            raise ConfigError("window.order is published or observed", order=repr(self.order))

    def publish(self, label: object) -> bool:
        """A `PolicyPublished` was read; True if the window advanced. Only the first publication of a label counts."""
        real = real_version(label)
        if real is None or real in self.published:
            return False
        self.published[real] = len(self.published)
        if real in self.observed:
            self.newest_observed = self.published[real]
        if self.order == "observed":
            return False
        if real in self.places:
            if self.places[real] == len(self.labels) - 1:
                return False  # observed just before its publication: it is the newest already
            self.labels.remove(real)
            self.places = {known: place for place, known in enumerate(self.labels)}
        self._append(real)
        return True

    def observe(self, labels: Iterable[Hashable]) -> bool:
        """Versions of a completed or failed group were read; True if the window advanced."""
        advanced = False
        for label in dict.fromkeys(labels):
            real = real_version(label)
            if real is None or real in self.observed:
                continue
            self.late_sightings += self._is_late(real)
            self.observed[real] = len(self.observed)
            self.newest_observed = max(self.newest_observed, self.published.get(real, -1))
            if real not in self.places:
                self._append(real)
                advanced = True
        return advanced

    def _append(self, label: str) -> None:
        self.places[label] = len(self.labels)
        self.labels.append(label)

    def _is_late(self, label: str) -> bool:
        """Whether a label published later than this one was observed before it."""
        rank = self.published.get(label)
        return rank is not None and self.newest_observed > rank

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
        return self.places.get(real) if real is not None else None

    def judge(self, trajectory_versions: Sequence[object]) -> WindowFacts:
        """Judge one group by the versions of its trajectories; those without a real version have no say."""
        current, cutoff = len(self.labels) - 1, self.cutoff_index
        count = len(trajectory_versions)
        if (
            count and trajectory_versions.count(trajectory_versions[0]) == count
        ):  # most groups are of one version
            place = self.index(trajectory_versions[0])
            if place is None:
                return WindowFacts(False, current, cutoff, ())
            return WindowFacts(
                self.keep_versions > 0 and place < cutoff, current, cutoff, (current - place,) * count
            )
        known = map(self.index, trajectory_versions)
        places = [place for place in known if place is not None]
        stale = self.keep_versions > 0 and min(places, default=cutoff) < cutoff
        return WindowFacts(stale, current, cutoff, tuple([current - place for place in places]))
