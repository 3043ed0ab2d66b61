"""Rules 4 and 5: how many versions one session may span, and whether it may go on under another one.

Checked before a preempted generation is resumed, so that no engine time goes into a trajectory that must be refused,
and again on the reply.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from schemas.errors import StalenessExceeded, TrajectoryVersionChanged
from schemas.versions import distinct_real


class SpanFacts(msgspec.Struct, frozen=True):
    """Distinct real versions of a session in first-seen order; switches = span - 1 (0 with none)."""

    versions: tuple[str, ...]

    @property
    def version_span(self) -> int:
        """How many distinct real versions."""
        return len(self.versions)

    @property
    def version_switches(self) -> int:
        """Distinct real versions beyond the first."""
        return max(0, len(self.versions) - 1)


def span_of(recorded: Iterable[object], candidate: Iterable[object] = ()) -> SpanFacts:
    """Span of the session's recorded versions in time order, then the candidate's."""
    return SpanFacts(tuple(distinct_real([*recorded, *candidate])))


def check_span(
    recorded: Iterable[object], candidate: Iterable[object], max_preempts: int | None, **ids: object
) -> SpanFacts:
    """Rule 4: raise `StalenessExceeded` iff there is a limit and the switches exceed it."""
    facts = span_of(recorded, candidate)
    if max_preempts is not None and facts.version_switches > max_preempts:
        raise StalenessExceeded(
            f"the session would span {facts.version_span} versions, at most {max_preempts + 1} are allowed",
            versions=list(facts.versions),
            version_span=facts.version_span,
            version_switches=facts.version_switches,
            max_preempts=max_preempts,
            max_version_span=max_preempts + 1,
            **ids,
        )
    return facts


def check_unchanged(recorded: Iterable[object], current: object, **ids: object) -> None:
    """Rule 5 (non-partial mode): raise if the session has a real version and the current real one is another."""
    versions = distinct_real(recorded)
    now = distinct_real([current])
    if versions and now and versions[-1] != now[0]:
        raise TrajectoryVersionChanged(
            f"the trajectory began under {versions[-1]!r} and would go on under {now[0]!r}",
            versions=versions,
            current_version=now[0],
            **ids,
        )
