"""Two runs side by side: the sequences of a replay must be those of the original; verdicts may differ and are reported.

Groups are matched by their name behind the run's id, attempts and samples by number, sequences by their order.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa

from analytics.archived_log import (
    completed_groups,
    of_type,
    recorded_settings,
    run_id_of,
    unique_events,
)
from analytics.archived_payloads import ArchivedPayloads
from analytics.catalog import connect
from schemas import events as ev

COMPARED = (
    "sample_index", "is_anchor", "status", "reward", "versions", "tokens", "loss_mask", "logprobs", "version_code",
    "segment_indices",
)  # fmt: skip
Key = tuple[str, int]


class VerdictChange(msgspec.Struct, frozen=True):
    """An attempt that was judged otherwise (None: not judged at all)."""

    group: str
    attempt: int
    before: str | None
    after: str | None


class Comparison(msgspec.Struct, frozen=True):
    """`different`: attempts whose sequences are not equal, with the columns that differ. `missing`, `extra`: attempts that
    completed only in the first, or only in the second run."""

    run_a: str
    run_b: str
    groups: int
    sequences: int
    tokens: int
    different: tuple[tuple[str, int, str], ...]
    missing: tuple[Key, ...]
    extra: tuple[Key, ...]
    verdicts: int
    verdict_changes: tuple[VerdictChange, ...]

    @property
    def ok(self) -> bool:
        """Every sequence of the first run came out again, equal in tokens, masks, log-probs and versions."""
        return not self.different and not self.missing


class _Run:
    def __init__(self, run_dir: Path) -> None:
        connection = connect(run_dir)
        try:
            self.run_id = run_id_of(connection, run_dir)
            self._payloads = ArchivedPayloads(run_dir, recorded_settings(connection, self.run_id))
            completed = completed_groups(connection, self.run_id)
            verdicts = of_type(unique_events(connection, "verdicts", self.run_id), ev.Verdict)
        finally:
            connection.close()
        self.groups = {(self._name(group), attempt): event for (group, attempt), event in completed.items()}
        self.verdicts = {(self._name(v.group_id), v.attempt): f"{v.outcome}({v.reason})" for v in verdicts}

    def _name(self, group_id: str) -> str:
        return group_id.removeprefix(f"{self.run_id}-")

    def sequences(self, key: Key) -> pa.Table:
        return self._payloads.sequences(self.groups[key])


def compare(run_a: Path, run_b: Path) -> Comparison:
    """Raises ArchiveError without archives, CorruptPayload or StoreError where a payload cannot be read."""
    a, b = _Run(run_a), _Run(run_b)
    both = sorted(set(a.groups) & set(b.groups))
    different: list[tuple[str, int, str]] = []
    sequences = tokens = 0
    for key in both:
        left, right = a.sequences(key), b.sequences(key)
        columns = unequal_columns(left, right)
        if columns:
            different.append((*key, ", ".join(columns)))
        sequences += left.num_rows
        tokens += a.groups[key].trainable_tokens
    judged = sorted(set(a.verdicts) | set(b.verdicts))
    changes = [
        VerdictChange(*key, a.verdicts.get(key), b.verdicts.get(key))
        for key in judged
        if a.verdicts.get(key) != b.verdicts.get(key)
    ]
    return Comparison(
        a.run_id, b.run_id, len(both), sequences, tokens, tuple(different), tuple(sorted(set(a.groups) - set(b.groups))),
        tuple(sorted(set(b.groups) - set(a.groups))), len(judged), tuple(changes),
    )  # fmt: skip


def unequal_columns(left: pa.Table, right: pa.Table) -> list[str]:
    """Columns (ids apart) in which two payloads differ; `rows` where their numbers do."""
    if left.num_rows != right.num_rows:
        return ["rows"]
    return [
        name
        for name in COMPARED
        if not left.column(name).combine_chunks().equals(right.column(name).combine_chunks())
    ]
