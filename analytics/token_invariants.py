"""Laws about tokens: what clients received is in the archive; segments, completions and payload files agree.

Each function yields None for what is right and a sentence for what is not.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from analytics.archived_payloads import ArchivedPayloads
from schemas import events as ev
from schemas.codec import decode_as
from schemas.errors import CorruptPayload, StoreError

ANSWERS = "answers"


class Answer(NamedTuple):
    """One line of a worker's own record."""

    parent_traj_id: str
    segment_index: int
    digest: str


class SegmentTokens(NamedTuple):
    """A live segment: its outputs as bytes, wherever they were stored."""

    segment: ev.TokenSegment
    output_ids: bytes
    output_logprobs: bytes
    abandoned: bool


LiveSegments = dict[str, list[SegmentTokens]]


def recorded_answers(run_dir: Path) -> Iterator[Answer]:
    """What the workers say that they received whole; a last line without its end was never used."""
    for file in sorted((run_dir / ANSWERS).glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and line.strip():
                told = json.loads(line)
                yield Answer(told["parent_traj_id"], told["segment_index"], told["digest"])


def answers_are_archived(
    connection: duckdb.DuckDBPyConnection, run_dir: Path, payloads: ArchivedPayloads
) -> Iterator[str | None]:
    """Every whole answer is in the archive with an equal digest (void epochs count: the client had it all the same)."""
    known: dict[tuple[str, int], set[str]] = defaultdict(set)
    for segment in _segments(connection, "SELECT raw, false FROM token_segments", payloads):
        known[segment.segment.parent_traj_id, segment.segment.segment_index] |= _digests(segment)
    for answer in recorded_answers(run_dir):
        found = known.get((answer.parent_traj_id, answer.segment_index))
        place = f"answer {answer.segment_index} of {answer.parent_traj_id}"
        if found is None:
            yield f"{place} is not in the archive"
        else:
            yield None if answer.digest in found else f"{place} has another digest in the archive"


def segments_make_the_groups(
    by_trajectory: LiveSegments, completed: Iterable[ev.GroupCompleted]
) -> Iterator[str | None]:
    """The facts of every completed trajectory follow from its archived live segments."""
    for group in completed:
        for facts in group.trajectories:
            yield _facts_differ(group, facts, by_trajectory.get(facts.parent_traj_id, []))


def payloads_hold_the_segments(
    by_trajectory: LiveSegments, payloads: ArchivedPayloads, completed: Iterable[ev.GroupCompleted]
) -> Iterator[str | None]:
    """The payload file has the recorded digest and counts, and its trainable tokens are its lineages' archived outputs."""
    by_lineage: dict[str, list[SegmentTokens]] = defaultdict(list)
    for segments in by_trajectory.values():
        for segment in segments:
            if not segment.abandoned:
                by_lineage[segment.segment.lineage_id].append(segment)
    for group in completed:
        place = f"payload of {group.group_id} attempt {group.attempt}"
        try:
            rows = payloads.sequences(group)
        except (CorruptPayload, StoreError) as wrong:
            yield f"{place}: {wrong.message}"
            continue
        problem = _payload_differs(group, rows, by_lineage)
        yield None if problem is None else f"{place} {problem}"


def _facts_differ(
    group: ev.GroupCompleted, facts: ev.TrajectoryFacts, segments: Sequence[SegmentTokens]
) -> str | None:
    live = [segment for segment in segments if not segment.abandoned]
    outputs = b"".join(segment.output_ids for segment in live)
    found = {
        "segments": len(segments),
        "abandoned_segments": len(segments) - len(live),
        "output_tokens": len(outputs) // 4,
        "tokens_digest": hashlib.sha256(outputs).hexdigest(),
        "preemptions": sum(segment.segment.preemptions for segment in segments),
    }
    wrong = [name for name, value in found.items() if getattr(facts, name) != value]
    return (
        f"{group.group_id} sample {facts.sample_index}: {', '.join(wrong)} differ from the segments"
        if wrong
        else None
    )


def _payload_differs(
    group: ev.GroupCompleted, rows: pa.Table, by_lineage: dict[str, list[SegmentTokens]]
) -> str | None:
    masks = [np.asarray(mask.values) for mask in rows.column("loss_mask")]
    if rows.num_rows != group.sequences or sum(int(mask.sum()) for mask in masks) != group.trainable_tokens:
        return "has other counts than its completion"
    lineages = rows.column("lineage_id").to_pylist()
    for lineage, mask, tokens, logprobs in zip(
        lineages, masks, rows.column("tokens"), rows.column("logprobs"), strict=True
    ):
        segments = by_lineage.get(lineage, [])
        trained = mask.astype(bool)
        ids = np.asarray(tokens.values, dtype="<i4")[trained].tobytes()
        values = np.asarray(logprobs.values, dtype="<f4")[trained].tobytes()
        if ids != b"".join(segment.output_ids for segment in segments):
            return f"trains on other tokens in lineage {lineage} than were archived"
        if values != b"".join(segment.output_logprobs for segment in segments):
            return f"has other log-probs in lineage {lineage} than were archived"
    return None


def live_segments(connection: duckdb.DuckDBPyConnection, payloads: ArchivedPayloads) -> LiveSegments:
    """Per trajectory its live segments in `segment_index` order."""
    found: dict[str, list[SegmentTokens]] = defaultdict(list)
    query = (
        "SELECT raw, abandoned FROM live_segments WHERE kind = 'train' ORDER BY parent_traj_id, segment_index"
    )
    for segment in _segments(connection, query, payloads):
        found[segment.segment.parent_traj_id].append(segment)
    return found


def _segments(
    connection: duckdb.DuckDBPyConnection, query: str, payloads: ArchivedPayloads
) -> Iterator[SegmentTokens]:
    cursor = connection.execute(query)
    while rows := cursor.fetchmany(2000):
        for raw, abandoned in rows:
            segment = decode_as(raw, ev.TokenSegment)
            ids, logprobs = segment.output_ids, segment.output_logprobs
            if segment.tokens_ref is not None:
                columns = payloads.open_arrow(segment.tokens_ref).to_pylist()[0]
                ids, logprobs = columns["output_ids"], columns["output_logprobs"]
            yield SegmentTokens(segment, ids, logprobs, abandoned)


def _digests(found: SegmentTokens) -> set[str]:
    """Of the output ids, and of the text that a chat client saw (`response` is the assistant message as JSON)."""
    digests = {hashlib.sha256(found.output_ids).hexdigest()}
    if found.segment.response is not None:
        content = json.loads(found.segment.response).get("content") or ""
        digests.add(hashlib.sha256(str(content).encode()).hexdigest())
    return digests
