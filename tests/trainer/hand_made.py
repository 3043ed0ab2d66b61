"""Groups, payload files and manifests made by hand, as the assembler and the controller would have made them."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import pyarrow as pa
import tiny_policy

from journal.payloads import PayloadStore
from schemas import ids
from schemas.arrow import GROUP_PAYLOAD, GROUP_PAYLOAD_CODEC
from schemas.events import BatchGroup, PayloadRef, TrainBatch, identified


def row(sample: int, *, reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    """One sequence: two context tokens, three sampled ones of version v000000."""
    base: dict[str, Any] = {
        "parent_traj_id": f"t{sample}",
        "sample_index": sample,
        "lineage_id": f"t{sample}-l0",
        "is_anchor": True,
        "status": "completed",
        "reward": reward,
        "trajectory_version": "v000000",
        "versions": ["v000000"],
        "tokens": [1, 2, 3, 4, 5],
        "loss_mask": [0, 0, 1, 1, 1],
        "logprobs": [0.0, 0.0, -1.0, -2.0, -3.0],
        "version_code": [-1, -1, 0, 0, 0],
        "segment_indices": [0],
        "experts_uri": [],
    }
    return base | changes


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=GROUP_PAYLOAD)


def arrow_file(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, GROUP_PAYLOAD) as writer:
        writer.write_table(table(rows))
    return sink.getvalue()


def random_group(seed: int, size: int = 4) -> list[dict[str, Any]]:
    """A group of random sequences in the tiny policy's vocabulary, rewards 0 and 1 in turn."""
    random = np.random.default_rng(seed)
    rows = []
    for sample in range(size):
        length = int(random.integers(6, 12))
        mask = [0, 0, *[1] * (length - 2)]
        logprobs = random.normal(-np.log(tiny_policy.VOCABULARY), 0.2, length) * np.array(mask)
        rows.append(
            row(
                sample,
                reward=float(sample % 2),
                parent_traj_id=f"g{seed}-t{sample}",
                lineage_id=f"g{seed}-t{sample}-l0",
                tokens=random.integers(0, tiny_policy.VOCABULARY, length).tolist(),
                loss_mask=mask,
                logprobs=logprobs.astype(np.float32).tolist(),
                version_code=[-1 if m == 0 else 0 for m in mask],
            )
        )
    return rows


def reference(data: bytes = b"") -> PayloadRef:
    digest = hashlib.sha256(data).hexdigest()
    return PayloadRef(f"r/g/0/{digest}", digest, len(data), GROUP_PAYLOAD_CODEC)


def batch_group(name: str, payload: PayloadRef | None = None, sequences: int = 2) -> BatchGroup:
    return BatchGroup(
        group_id=name,
        attempt=0,
        payload=payload or reference(),
        sequences=sequences,
        trainable_tokens=3 * sequences,
        versions=("v000000",),
    )


def manifest(run_id: str, step: int, groups: list[BatchGroup], *, branch: str = "") -> TrainBatch:
    return identified(
        TrainBatch(
            run_id=run_id,
            occurred_at=1_000_000 * step,
            cause_offset=10 * step,
            index=0,
            batch_id=ids.batch_id(run_id, step, branch),
            step=step,
            branch=branch,
            groups=tuple(groups),
            current_version="v000000",
            cutoff_version="v000000",
            window=("v000000",),
        )
    )


def stored_batch(store: PayloadStore, run_id: str, step: int, groups: int = 2) -> TrainBatch:
    """A batch of random groups whose payload files are in the store. The same step gives the same files."""
    made = []
    for index in range(groups):
        name = f"group-{step}-{index}"
        data = arrow_file(random_group(100 * step + index))
        made.append(batch_group(name, store.put(run_id, name, 0, data, GROUP_PAYLOAD_CODEC), sequences=4))
    return manifest(run_id, step, made)
