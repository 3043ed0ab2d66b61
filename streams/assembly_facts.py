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
from itertools import chain

from schemas.events import TokenSegment, TrajectoryFacts
from schemas.versions import distinct_real, real_version
from streams.assembly_trajectory import Trajectory

LONGEST_REASON = 256
"""Whoever ends a trajectory may say what he likes, and a group of a thousand of them is told in one record."""


def trajectory_version(labels_by_segment: Iterable[tuple[int, Sequence[str]]]) -> str:
    """Per segment, in log order or, where no index is there twice, in any: its index and the labels of its spans, in order.
    "" if none is real."""
    best, version = -1, ""
    for index, labels in labels_by_segment:
        if index < best:
            continue
        for label in reversed(labels):
            if (real := real_version(label)) is not None:
                best, version = index, real
                break
    return version


def abandoned(segments: Sequence[TokenSegment]) -> frozenset[int]:
    """Indices of the segments whose answer the client never received."""
    if len({(s.parent_segment_index, s.request_digest) for s in segments}) == len(segments):
        return frozenset()  # nearly always
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
    return facts_of_segments(trajectory, segments, abandoned(segments), sequences)


def facts_of_segments(
    trajectory: Trajectory, segments: Sequence[TokenSegment], left: frozenset[int], sequences: int
) -> TrajectoryFacts:
    """The same of its segments in order, of which `left` are abandoned."""
    live = [s for s in segments if s.segment_index not in left] if left else segments
    labels = [(s.segment_index, [span.version for span in s.spans]) for s in live]
    end = trajectory.end
    assert trajectory.sample_index is not None  # only trajectories with a session event are told about
    return TrajectoryFacts(
        parent_traj_id=trajectory.parent_traj_id,
        sample_index=trajectory.sample_index,
        version=trajectory_version(reversed(labels)),
        versions=tuple(distinct_real(chain.from_iterable(own for _, own in labels))),
        reward=trajectory.reward,
        status=end.status if end else "failed",
        reason=end.reason[:LONGEST_REASON] if end else "unfinished",
        segments=len(segments),
        sequences=sequences,
        output_tokens=sum([len(s.output_ids) for s in live]) // 4,
        context_tokens=sum([len(s.context_ids) for s in live]) // 4,
        preemptions=sum([s.preemptions for s in segments]),
        abandoned_segments=len(left),
        tokens_digest=hashlib.sha256(b"".join([s.output_ids for s in live])).hexdigest(),
        started_at=trajectory.started_at or trajectory.newest_at,
        ended_at=trajectory.ended_at,
    )
