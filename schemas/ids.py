"""Deterministic ids: the same fact has the same id wherever and whenever it is written.

An id is 32 hex digits of sha256 over the parts, each preceded by its length, so that no two part lists collide.
"""

from __future__ import annotations

import hashlib


def stable_id(*parts: str | int | None) -> str:
    """32 hex digits that depend on all parts, their order and their types (None, text, number)."""
    digest = hashlib.sha256()
    for part in parts:
        text = "n" if part is None else f"i{part}" if isinstance(part, int) else f"s{part}"
        raw = text.encode()
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    return digest.hexdigest()[:32]


def group_id(run_id: str, dataset_epoch: int, prompt_index: int) -> str:
    """The group of one prompt in one pass over the dataset; readable, and unique within a run."""
    return f"{run_id}-e{dataset_epoch}-p{prompt_index:06d}"


def parent_traj_id(run_id: str, group: str, attempt: int, sample_index: int) -> str:
    """Design §2: hash(run, group, attempt, sample_index)."""
    return stable_id("trajectory", run_id, group, attempt, sample_index)


def free_traj_id(run_id: str, session_id: str) -> str:
    """The trajectory of a session that belongs to no group."""
    return stable_id("free", run_id, session_id)


def lineage_id(parent_traj: str, first_segment_index: int) -> str:
    """A lineage is named by the segment that started it."""
    return stable_id("lineage", parent_traj, first_segment_index)


def batch_id(run_id: str, step: int, branch: str = "") -> str:
    """Design §5: the batch request of a step is (run, step); after a rollback the branch is part of it."""
    return stable_id("batch", run_id, step, branch)


def worker_group(prefix: str, run_id: str, name: str) -> str:
    """The consumer group of a run's stream processors of this name."""
    return ".".join(part for part in (prefix, run_id, name) if part)


def topic_name(prefix: str, name: str) -> str:
    """Full topic name; an empty prefix leaves the name as it is."""
    return f"{prefix}.{name}" if prefix else name
