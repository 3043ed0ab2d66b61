"""Lineages of a complete trajectory as training sequences. Pure; built when the group is complete, not before.

A segment's tokens are those of its parent, cut at `branch_point`, then its context and its output. A lineage's sequence
is that of its last live segment. A token is trainable in exactly one sequence: that of the lineage whose segment
produced it; outputs inherited from another lineage, and those of abandoned turns, have mask 0. A lineage without a
trainable token gives no sequence. The anchor is the sequence with the last trainable segment in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.events import TokenSegment, TrajectoryFacts
from schemas.tokens import ids_of, logprobs_of
from schemas.versions import real_version
from streams.assembly_facts import abandoned, facts_of, ordered_segments
from streams.assembly_trajectory import Trajectory


class TokenSequence(NamedTuple):
    """One row of a group's payload (`schemas.arrow.GROUP_PAYLOAD`); arrays are [T], context and output.

    `segment_indices` and `experts_uri`: the segments whose tokens these are, inherited ones included, in order.
    """

    parent_traj_id: str
    sample_index: int
    lineage_id: str
    is_anchor: bool
    status: str
    reward: float | None
    trajectory_version: str
    versions: tuple[str, ...]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    version_code: NDArray[np.int32]
    segment_indices: tuple[int, ...]
    experts_uri: tuple[str | None, ...]


class _Columns(NamedTuple):
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    version_code: NDArray[np.int32]
    versions: tuple[str, ...]


def sequences_of(trajectory: Trajectory) -> tuple[TrajectoryFacts, list[TokenSequence]]:
    """Facts and sequences of a settled trajectory; a failed one gives no sequence. SchemaError: its lineages cannot be."""
    if trajectory.failed:
        return facts_of(trajectory, 0), []
    segments = ordered_segments(trajectory)
    left = abandoned(segments)
    by_lineage: dict[str, list[TokenSegment]] = {}
    for segment in segments:
        by_lineage.setdefault(segment.lineage_id, []).append(segment)
    built: list[tuple[int, str, list[TokenSegment], _Columns]] = []
    for lineage_id, own in by_lineage.items():
        trainable = {s.segment_index for s in own if s.segment_index not in left and s.output_ids}
        if not trainable:
            continue
        path = _path(segments, max(trainable))
        if missing := trainable.difference(s.segment_index for s in path):
            raise SchemaError(
                f"segments {sorted(missing)} are no part of their lineage's last context",
                lineage_id=lineage_id,
            )
        columns = _columns(path, trainable)
        if columns.loss_mask.any():
            built.append((max(trainable), lineage_id, path, columns))
    facts = facts_of(trajectory, len(built))
    anchor = max((last for last, *_ in built), default=-1)
    rows = [_row(facts, trajectory, lineage, last == anchor, path, c) for last, lineage, path, c in built]
    return facts, rows


def _row(
    facts: TrajectoryFacts, trajectory: Trajectory, lineage_id: str, is_anchor: bool,
    path: Sequence[TokenSegment], columns: _Columns,
) -> TokenSequence:  # fmt: skip
    return TokenSequence(
        facts.parent_traj_id, facts.sample_index, lineage_id, is_anchor, facts.status, trajectory.reward, facts.version,
        columns.versions, columns.tokens, columns.loss_mask, columns.logprobs, columns.version_code,
        tuple(s.segment_index for s in path),
        tuple(s.experts.uri if s.experts else None for s in path),
    )  # fmt: skip


def _path(segments: Sequence[TokenSegment], leaf: int) -> list[TokenSegment]:
    """From the root to the leaf. Indices are 0..n-1 here, and a parent is earlier than its child."""
    path = [segments[leaf]]
    while (parent := path[-1].parent_segment_index) is not None:
        path.append(segments[parent])
    return path[::-1]


def _columns(path: Sequence[TokenSegment], trainable: set[int]) -> _Columns:
    room = sum(len(s.context_ids) + len(s.output_ids) for s in path) // 4
    tokens = np.empty(room, np.int32)
    mask = np.zeros(room, np.uint8)
    logprobs = np.zeros(room, np.float32)
    codes = np.full(room, -1, np.int32)
    labels: dict[str, int] = {}
    at, cuts = 0, False
    for segment in path:
        cuts = cuts or segment.branch_point not in (None, at)
        at = _cut(segment, at, mask, logprobs, codes)
        context, output = ids_of(segment.context_ids), ids_of(segment.output_ids)
        tokens[at : at + context.size] = context
        at += context.size
        stop = at + output.size
        tokens[at:stop] = output
        logprobs[at:stop] = logprobs_of(segment.output_logprobs)
        mask[at:stop] = segment.segment_index in trainable
        for span in segment.spans:
            version = real_version(span.version)
            if version is not None and span.stop > span.start:
                codes[at + span.start : at + span.stop] = labels.setdefault(version, len(labels))
        at = stop
    columns = _Columns(tokens[:at], mask[:at], logprobs[:at], codes[:at], tuple(labels))
    return _used_versions(columns) if cuts else columns


def _cut(
    segment: TokenSegment,
    at: int,
    mask: NDArray[np.uint8],
    logprobs: NDArray[np.float32],
    codes: NDArray[np.int32],
) -> int:
    """Where the segment begins; what is cut off is as if it had never been written."""
    cut = segment.branch_point
    if cut is None or cut == at:
        return at
    if cut > at:
        raise SchemaError(
            f"segment {segment.segment_index} branches beyond its parent", branch_point=cut, parent_tokens=at
        )
    mask[cut:at], logprobs[cut:at], codes[cut:at] = 0, 0.0, -1
    return cut


def _used_versions(columns: _Columns) -> _Columns:
    """A version whose tokens were all cut off goes."""
    used = [code for code in range(len(columns.versions)) if np.any(columns.version_code == code)]
    if len(used) == len(columns.versions):
        return columns
    table = np.full(len(columns.versions) + 1, -1, np.int32)  # the last entry is that of code -1
    table[used] = np.arange(len(used), dtype=np.int32)
    versions = tuple(columns.versions[code] for code in used)
    return columns._replace(version_code=table[columns.version_code], versions=versions)
