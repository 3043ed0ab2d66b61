"""From a batch manifest to training sequences: payload files, rule 6, rule 8, lags.

The payload of a group is one Arrow file, opened by its digest and memory-mapped; token columns are views on
it. What cannot be trained on is left out here and counted: a sequence whose rollout log-probs are not finite,
and a group with fewer than two rewarded trajectories. Everything else about a sequence is the assembler's
word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.events import BatchGroup, PayloadRef, TrainBatch
from schemas.loss_mask import mask_nonlast_version_tokens
from schemas.versions import real_version
from trainer.advantages import RewardedLineage, Std, lineage_advantages
from trainer.packing import TrainSequence, has_finite_logprobs

OpenPayload = Callable[[PayloadRef], pa.Table]


@dataclass(frozen=True, slots=True)
class SequenceOrigin:
    """Where a training sequence comes from: what its feedback event names."""

    group_id: str
    attempt: int
    parent_traj_id: str
    sample_index: int
    lineage_id: str
    reward: float


@dataclass(slots=True)
class StepData:
    """Sequences of one step with their origins (same order), and facts of the batch as a whole."""

    sequences: list[TrainSequence] = field(default_factory=list)
    origins: list[SequenceOrigin] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # one per trajectory
    version_spans: list[int] = field(default_factory=list)  # distinct real versions, per trajectory
    zero_variance_groups: int = 0
    unusable_groups: int = 0
    unusable_sequences: int = 0


class BatchReader:
    """`mask_nonlast`: rule 6. `std`: how rule 8 divides."""

    def __init__(self, open_payload: OpenPayload, *, mask_nonlast: bool, std: Std) -> None:
        self._open = open_payload
        self._mask_nonlast = mask_nonlast
        self._std: Std = std

    def read(self, batch: TrainBatch, ordinals: Mapping[str, int]) -> StepData:
        """Sequences in the manifest's order. `ordinals` of the published versions; others have none (-1).

        CorruptPayload when a file does not have its digest, StoreError when it cannot be read.
        """
        data = StepData()
        for group in batch.groups:
            self._read_group(group, self._open(group.payload), ordinals, data)
        return data

    def _read_group(
        self, group: BatchGroup, table: pa.Table, ordinals: Mapping[str, int], data: StepData
    ) -> None:
        rows = _Rows(table)
        live = [i for i in range(len(rows)) if not rows.excluded(i)]
        if len({rows.parent[i] for i in live}) < 2:
            data.unusable_groups += 1
            return
        advantages = lineage_advantages([rows.rewarded(i) for i in live], std=self._std)
        data.zero_variance_groups += not any(advantages.values())
        rewards = {rows.parent[i]: float(rows.reward[i]) for i in live if rows.anchor[i]}
        data.rewards += rewards.values()
        data.version_spans += rows.version_spans(live)
        for i in live:
            sequence = self._sequence(group, rows, i, advantages[rows.lineage[i]], ordinals)
            if sequence is None:
                data.unusable_sequences += 1
                continue
            data.sequences.append(sequence)
            data.origins.append(
                SequenceOrigin(
                    group_id=group.group_id,
                    attempt=group.attempt,
                    parent_traj_id=rows.parent[i],
                    sample_index=rows.sample[i],
                    lineage_id=rows.lineage[i],
                    reward=rewards[rows.parent[i]],
                )
            )

    def _sequence(
        self, group: BatchGroup, rows: _Rows, i: int, advantage: float, ordinals: Mapping[str, int]
    ) -> TrainSequence | None:
        mask, codes = rows.column("loss_mask", i), rows.column("version_code", i)
        if not len(mask) or mask[0]:
            return None  # the first token has nothing to be predicted from
        if self._mask_nonlast:
            mask = mask_nonlast_version_tokens(mask, codes)
        sequence = TrainSequence(
            key=rows.lineage[i],
            prompt=group.group_id,
            tokens=rows.column("tokens", i),
            mask=mask,
            rollout_logprobs=rows.column("logprobs", i),
            versions=_ordinals(rows.versions[i], codes, ordinals),
            advantage=advantage,
        )
        return sequence if has_finite_logprobs(sequence) else None


class _Rows:
    """A payload table by row; token columns without a copy."""

    def __init__(self, table: pa.Table) -> None:
        self.parent: list[str] = table.column("parent_traj_id").to_pylist()
        self.sample: list[int] = table.column("sample_index").to_pylist()
        self.lineage: list[str] = table.column("lineage_id").to_pylist()
        self.anchor: list[bool] = table.column("is_anchor").to_pylist()
        self.status: list[str] = table.column("status").to_pylist()
        self.reward: list[Any] = table.column("reward").to_pylist()
        self.versions: list[list[str]] = table.column("versions").to_pylist()
        self._lists: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        for name in ("tokens", "loss_mask", "logprobs", "version_code"):
            column = table.column(name).combine_chunks()
            self._lists[name] = (column.values.to_numpy(), column.offsets.to_numpy())

    def __len__(self) -> int:
        return len(self.parent)

    def column(self, name: str, i: int) -> NDArray[Any]:
        """The token column of row `i` [T]."""
        values, offsets = self._lists[name]
        return values[offsets[i] : offsets[i + 1]]

    def excluded(self, i: int) -> bool:
        """A failed trajectory in a group that lives on without it takes no part."""
        return self.status[i] == "failed"

    def rewarded(self, i: int) -> RewardedLineage:
        """Row `i` as rule 8 sees it."""
        return RewardedLineage(self.lineage[i], self.parent[i], self.anchor[i], self.reward[i])

    def version_spans(self, rows: Sequence[int]) -> list[int]:
        """Distinct real versions of each trajectory among `rows`."""
        versions: dict[str, set[str]] = {}
        for i in rows:
            real = {label for label in map(real_version, self.versions[i]) if label is not None}
            versions.setdefault(self.parent[i], set()).update(real)
        return [len(distinct) for distinct in versions.values()]


def _ordinals(
    labels: Sequence[str], codes: NDArray[np.int32], ordinals: Mapping[str, int]
) -> NDArray[np.int32]:
    """Per token the ordinal of its version, -1 where it has none or the version was never published."""
    table = np.array([*(ordinals.get(label, -1) for label in labels), -1], dtype=np.int32)
    return np.asarray(table[codes], dtype=np.int32)  # code -1 picks the last entry
