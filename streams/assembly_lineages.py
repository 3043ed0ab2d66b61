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
from schemas.versions import real_version
from streams.assembly_facts import abandoned, facts_of_segments, ordered_segments
from streams.assembly_trajectory import Trajectory

_WIDTH = 4  # bytes of an id, of a log-prob and of a version's code
_NO_CODE = b"\xff" * _WIDTH  # -1


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
    segments = ordered_segments(trajectory)
    left = abandoned(segments)
    if trajectory.failed:
        return facts_of_segments(trajectory, segments, left, 0), []
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
    facts = facts_of_segments(trajectory, segments, left, len(built))
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
    """Put together as bytes: an array's operation costs as much as a turn has tokens to copy."""
    tokens, mask, logprobs, codes = bytearray(), bytearray(), bytearray(), bytearray()
    labels: dict[str, int] = {}
    cuts = False
    for segment in path:
        if segment.branch_point is not None:
            cuts = _cut(segment, tokens, mask, logprobs, codes) or cuts
        context, output = len(segment.context_ids) // _WIDTH, len(segment.output_ids) // _WIDTH
        tokens += segment.context_ids
        tokens += segment.output_ids
        logprobs += bytes(len(segment.context_ids))
        logprobs += segment.output_logprobs
        mask += b"\0" * context
        mask += (b"\1" if segment.segment_index in trainable else b"\0") * output
        codes += _NO_CODE * context
        for span in segment.spans:
            if span.stop > span.start:
                codes += _code(span.version, labels) * (span.stop - span.start)
    columns = _Columns(
        np.frombuffer(tokens, np.int32), np.frombuffer(mask, np.uint8), np.frombuffer(logprobs, np.float32),
        np.frombuffer(codes, np.int32), tuple(labels),
    )  # fmt: skip
    return _used_versions(columns) if cuts else columns


def _code(label: str, labels: dict[str, int]) -> bytes:
    """Of one token; the first token of a version gives it its number."""
    version = real_version(label)
    return _NO_CODE if version is None else labels.setdefault(version, len(labels)).to_bytes(_WIDTH, "little")


def _cut(
    segment: TokenSegment, tokens: bytearray, mask: bytearray, logprobs: bytearray, codes: bytearray
) -> bool:
    """Whether the parent's end goes, because the segment begins before it. SchemaError: it begins behind it."""
    cut, there = segment.branch_point, len(mask)
    if cut is None or cut == there:
        return False
    if cut > there:
        raise SchemaError(
            f"segment {segment.segment_index} branches beyond its parent",
            branch_point=cut,
            parent_tokens=there,
        )
    del mask[cut:]
    for column in (tokens, logprobs, codes):
        del column[cut * _WIDTH :]
    return True


def _used_versions(columns: _Columns) -> _Columns:
    """A version whose tokens were all cut off goes."""
    used = [code for code in range(len(columns.versions)) if np.any(columns.version_code == code)]
    if len(used) == len(columns.versions):
        return columns
    table = np.full(len(columns.versions) + 1, -1, np.int32)  # the last entry is that of code -1
    table[used] = np.arange(len(used), dtype=np.int32)
    versions = tuple(columns.versions[code] for code in used)
    return columns._replace(version_code=table[columns.version_code], versions=versions)
