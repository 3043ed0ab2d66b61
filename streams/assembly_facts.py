"""What the control plane is told about a trajectory: its version, its abandoned turns, its numbers. Pure.

* Trajectory version (`reference` name W3): end version of the segment with the highest index among those with a real
  version; equal index: the later one. A later segment without a real version does not hide an earlier one with.
* Abandoned turn (design §5): of two segments with the same parent and request digest, the later received after the
  earlier had ended, the earlier was never received: mask 0, no anchor, no version.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from schemas.events import TokenSegment, TrajectoryFacts
from schemas.versions import distinct_real, real_version
from streams.assembly_trajectory import Trajectory

LONGEST_REASON = 256
"""Whoever ends a trajectory may say what he likes, and a group of a thousand of them is told in one record."""


def trajectory_version(labels_by_segment: Iterable[tuple[int, Iterable[object]]]) -> str:
    """Per segment, in log order: its index and the labels of its spans, in order. "" if none is real."""
    best: tuple[int, str] | None = None
    for index, labels in labels_by_segment:
        real = [label for label in map(real_version, labels) if label is not None]
        if real and (best is None or index >= best[0]):
            best = index, real[-1]
    return best[1] if best else ""


def abandoned(segments: Sequence[TokenSegment]) -> frozenset[int]:
    """Indices of the segments whose answer the client never received."""
    if len({(s.parent_segment_index, s.request_digest) for s in segments}) == len(segments):
        return frozenset()  # nearly always, and asked twice for every trajectory
    alike: dict[tuple[int | None, str], list[TokenSegment]] = defaultdict(list)
    for segment in segments:
        alike[segment.parent_segment_index, segment.request_digest].append(segment)
    return frozenset(
        earlier.segment_index
        for group in alike.values()
        if len(group) > 1
        for earlier in group
        if any(
            later.segment_index > earlier.segment_index and later.received_at >= earlier.done_at
            for later in group
        )
    )


def ordered_segments(trajectory: Trajectory) -> list[TokenSegment]:
    """Its segments in `segment_index` order."""
    return [trajectory.segments[index] for index in sorted(trajectory.segments)]


def facts_of(trajectory: Trajectory, sequences: int) -> TrajectoryFacts:
    """Facts of a trajectory as far as it is known; `sequences`: how many rows of the payload are its own."""
    segments = ordered_segments(trajectory)
    left = abandoned(segments)
    live = [segment for segment in segments if segment.segment_index not in left]
    digest = hashlib.sha256()
    for segment in live:
        digest.update(segment.output_ids)
    end = trajectory.end
    assert trajectory.sample_index is not None  # only trajectories with a session event are told about
    return TrajectoryFacts(
        parent_traj_id=trajectory.parent_traj_id,
        sample_index=trajectory.sample_index,
        version=trajectory_version((s.segment_index, (span.version for span in s.spans)) for s in live),
        versions=tuple(distinct_real(span.version for s in live for span in s.spans)),
        reward=trajectory.reward,
        status=end.status if end else "failed",
        reason=end.reason[:LONGEST_REASON] if end else "unfinished",
        segments=len(segments),
        sequences=sequences,
        output_tokens=sum(len(s.output_ids) for s in live) // 4,
        context_tokens=sum(len(s.context_ids) for s in live) // 4,
        preemptions=sum(s.preemptions for s in segments),
        abandoned_segments=len(left),
        tokens_digest=digest.hexdigest(),
        started_at=trajectory.started_at or trajectory.newest_at,
        ended_at=trajectory.ended_at,
    )
