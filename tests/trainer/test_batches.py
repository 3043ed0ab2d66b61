"""Manifest to sequences: rule 6, rule 8, what is left out, lags, feedback, step metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hand_made
import numpy as np
import pytest
import tiny_policy
from hand_made import row

from journal.payloads import PayloadStore
from schemas.errors import CorruptPayload
from schemas.settings import TrainerSettings
from schemas.tokens import ids_of, logprobs_of
from trainer.backends.torch_backend import TorchBackend, make_deterministic
from trainer.batches import BatchReader, StepData
from trainer.feedback import NO_LAG, StepIdentity
from trainer.step import StepOutcome, StepRunner, optimizer_of

ORDINALS = {"v000000": 0, "v000001": 1, "v000002": 2}
SETTINGS = TrainerSettings(loss="sat", learning_rate=1e-3, entropy_bonus=0.04)


def read(rows: list[dict[str, Any]], *, mask_nonlast: bool = False) -> StepData:
    reader = BatchReader(lambda _ref: hand_made.table(rows), mask_nonlast=mask_nonlast, std="none")
    return reader.read(hand_made.manifest("run", 3, [hand_made.batch_group("g")]), ORDINALS)


def test_rows_become_sequences_in_order() -> None:
    data = read([row(0, reward=1.0), row(1, reward=0.0)])
    first = data.sequences[0]
    assert [s.key for s in data.sequences] == ["t0-l0", "t1-l0"]
    assert first.tokens.tolist() == [1, 2, 3, 4, 5]
    assert first.mask.tolist() == [0, 0, 1, 1, 1]
    assert first.rollout_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert first.versions.tolist() == [-1, -1, 0, 0, 0]
    assert [s.advantage for s in data.sequences] == [0.5, -0.5]
    assert [s.prompt for s in data.sequences] == ["g", "g"]
    assert [o.reward for o in data.origins] == [1.0, 0.0]
    assert (data.rewards, data.version_spans, data.zero_variance_groups) == ([1.0, 0.0], [1, 1], 0)


def test_version_that_was_never_published_has_no_ordinal() -> None:
    mixed = row(0, versions=["default", "v000002"], version_code=[-1, -1, 0, 1, 1])
    assert read([mixed, row(1)]).sequences[0].versions.tolist() == [-1, -1, -1, 2, 2]


def test_rule_6_keeps_only_the_last_versions_tokens() -> None:
    mixed = row(0, versions=["v000000", "v000001"], version_code=[-1, -1, 0, 1, 1])
    assert read([mixed, row(1)]).sequences[0].mask.tolist() == [0, 0, 1, 1, 1]
    assert read([mixed, row(1)], mask_nonlast=True).sequences[0].mask.tolist() == [0, 0, 0, 1, 1]


def test_lineages_share_the_advantage_of_their_trajectory() -> None:
    rows = [
        row(0, reward=None, lineage_id="a", is_anchor=False),
        row(0, reward=2.0, lineage_id="b"),
        row(1, reward=4.0),
    ]
    data = read(rows)
    assert [s.advantage for s in data.sequences] == [-1, -1, 1]
    assert [o.reward for o in data.origins] == [2.0, 2.0, 4.0]
    assert data.rewards == [2.0, 4.0]


def test_failed_trajectories_take_no_part() -> None:
    data = read([row(0, reward=2.0), row(1, reward=4.0), row(2, reward=None, status="failed")])
    assert [s.advantage for s in data.sequences] == [-1, 1]


def test_group_with_one_live_trajectory_is_left_out_and_counted() -> None:
    data = read([row(0), row(1, status="failed")])
    assert (data.sequences, data.unusable_groups) == ([], 1)


def test_zero_variance_group_is_counted_and_has_advantage_zero() -> None:
    data = read([row(0), row(1)])
    assert (data.zero_variance_groups, [s.advantage for s in data.sequences]) == (1, [0, 0])


@pytest.mark.parametrize(
    "change",
    [{"logprobs": [0.0, 0.0, -1.0, float("nan"), -3.0]}, {"loss_mask": [1, 0, 1, 1, 1]}],
    ids=["log-prob is not finite", "first token trainable"],
)
def test_sequence_that_cannot_be_trained_on_is_left_out_and_counted(change: dict[str, Any]) -> None:
    data = read([row(0, reward=0.0, **change), row(1)])
    assert [s.key for s in data.sequences] == ["t1-l0"]
    assert data.unusable_sequences == 1
    assert data.sequences[0].advantage == 0.5  # its trajectory still counts in the statistics


def test_payload_from_the_store_is_checked_by_its_digest(tmp_path: Path) -> None:
    store = PayloadStore(str(tmp_path))
    batch = hand_made.stored_batch(store, "run", 1)
    reader = BatchReader(store.open_arrow, mask_nonlast=False, std="bessel")
    assert len(reader.read(batch, ORDINALS).sequences) == 8
    path = tmp_path / batch.groups[0].payload.uri
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptPayload):
        reader.read(batch, ORDINALS)


def run_step(tmp_path: Path, rows: list[dict[str, Any]]) -> StepOutcome:
    make_deterministic(seed=0, threads=1)
    backend = TorchBackend(tiny_policy.write_checkpoint(tmp_path / "initial"), optimizer_of(SETTINGS))
    batch = hand_made.manifest("run", 3, [hand_made.batch_group("g")])
    identity = StepIdentity(batch, "v000002", 2, 77)
    return StepRunner(backend, SETTINGS).run(batch, read(rows), identity)


def test_feedback_names_the_sequence_and_holds_its_trainable_tokens(tmp_path: Path) -> None:
    mixed = row(0, reward=0.0, versions=["v000001", "x", "v000002"], version_code=[-1, -1, 0, 1, 2])
    first, second = run_step(tmp_path, [mixed, row(1, reward=1.0)]).feedback
    assert (first.parent_traj_id, first.lineage_id, first.sample_index) == ("t0", "t0-l0", 0)
    assert (first.version, first.step, first.group_id, first.occurred_at) == ("v000002", 3, "g", 77)
    assert (first.reward, first.advantage, second.advantage) == (0.0, -0.5, 0.5)
    assert ids_of(first.lag).tolist() == [1, NO_LAG, 0]
    assert ids_of(second.lag).tolist() == [2, 2, 2]
    rollout, trainer = logprobs_of(first.rollout_logprobs), logprobs_of(first.trainer_logprobs)
    assert rollout.tolist() == [-1, -2, -3]
    assert bool((trainer < 0).all())
    assert first.ratio_mean == pytest.approx(float(np.exp(trainer - rollout).mean()), rel=1e-6)
    assert len({first.event_id, second.event_id, ""}) == 3


def test_step_reports_rewards_lags_and_drift(tmp_path: Path) -> None:
    mixed = row(0, reward=0.0, versions=["v000001", "x", "v000002"], version_code=[-1, -1, 0, 1, 2])
    outcome = run_step(tmp_path, [mixed, row(1, reward=1.0)])
    expected = {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "sequences": 2,
        "tokens": 6,
        "groups": 1,
        "zero_variance_groups": 0,
        "tokens_without_lag": 1,
        "lag_mean": (1 + 0 + 2 + 2 + 2) / 5,
        "lag_max": 2,
        "staleness/version_span_max": 3,
        "staleness/version_span_min": 1,
    }
    assert {name: outcome.metrics[name] for name in expected} == pytest.approx(expected)
    assert [(rows.lag, rows.tokens) for rows in outcome.drift] == [(0, 1), (1, 1), (2, 3)]
    needed = {
        "loss",
        "grad_norm",
        "entropy",
        "clip_fraction",
        "logprob_abs_diff",
        "sat_bandwidth",
        "step_seconds",
    }
    assert needed <= outcome.metrics.keys()


def test_batch_without_anything_to_train_on_is_still_a_step(tmp_path: Path) -> None:
    outcome = run_step(tmp_path, [row(0, status="failed"), row(1, status="failed")])
    assert outcome.feedback == []
    assert (outcome.metrics["unusable_groups"], outcome.metrics["updated"]) == (1, 0)
