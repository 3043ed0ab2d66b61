"""The torch backend on a tiny Qwen3.

Right numbers, the same bits twice, and a checkpoint that loses nothing.
"""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_policy
import torch

from schemas.errors import ConfigError, CorruptPayload, InvariantBroken, StoreError
from trainer.backends.contract import Backend, OptimizerSettings
from trainer.backends.durable import atomic_directory
from trainer.backends.torch_backend import TorchBackend, make_deterministic
from trainer.losses.registry import build_loss
from trainer.packing import PackedBatch, TrainSequence, pack_step

SETTINGS = OptimizerSettings(learning_rate=1e-2, warmup_steps=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy.write_checkpoint(tmp_path_factory.mktemp("initial"))


@pytest.fixture(autouse=True)
def deterministic() -> None:
    make_deterministic(seed=0, threads=1)


def backend(checkpoint: Path) -> TorchBackend:
    return TorchBackend(checkpoint, SETTINGS, sync=False)


def packed(sequences: list[TrainSequence] | None = None, *, max_tokens: int = 10_000) -> list[PackedBatch]:
    return pack_step(
        sequences or tiny_policy.sequences(), aggregation="seq_mean_token_mean", max_tokens=max_tokens
    )


def train(policy: Backend, steps: range, loss: str = "sat") -> str:
    for seed in steps:
        policy.train_step(packed(tiny_policy.sequences(seed=seed)), build_loss(loss), entropy_bonus=0.04)
    return policy.digest()


def test_log_probs_are_those_of_the_model_at_the_temperature(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    sequences = tiny_policy.sequences()
    policy = TorchBackend(checkpoint, SETTINGS, temperature=0.7)
    scored = np.split(policy.score(packed(sequences)[0]), packed(sequences)[0].boundaries[1:-1])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for sequence, logprobs in zip(sequences, scored, strict=True):
        tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].double() / 0.7
        expected = torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1).numpy()
        wanted = np.where(sequence.mask != 0, np.concatenate([[0.0], expected]), 0)
        np.testing.assert_allclose(logprobs, wanted, atol=2e-6)


def test_step_reports_the_log_probs_that_score_gives(checkpoint: Path) -> None:
    policy = backend(checkpoint)
    (batch,) = packed()
    before = policy.score(batch)
    facts = policy.train_step([batch], build_loss("ppo")).facts[0]
    assert np.array_equal(facts.logprobs, before)
    assert bool((facts.entropy[batch.mask] > 0).all())
    assert not facts.clipped[~batch.mask].any()
    assert not np.array_equal(policy.score(batch), before)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "sat", "sat_gspo"])
def test_two_runs_give_the_same_digest(checkpoint: Path, loss: str) -> None:
    assert train(backend(checkpoint), range(3), loss) == train(backend(checkpoint), range(3), loss)


def test_digest_names_the_weights(checkpoint: Path) -> None:
    policy = backend(checkpoint)
    initial = policy.digest()
    assert initial == backend(checkpoint).digest()
    assert train(policy, range(1)) != initial


@pytest.mark.parametrize("tied", [False, True])
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, tied: bool) -> None:
    initial = tiny_policy.write_checkpoint(tmp_path / "initial", tied=tied)
    uninterrupted = train(backend(initial), range(4))
    first = backend(initial)
    train(first, range(2))
    first.save(tmp_path / "step-2", {"step": 2, "batch_id": "b-2"})
    torch.rand(3)  # another use of the generator between save and load must not matter
    resumed = backend(initial)
    assert resumed.load(tmp_path / "step-2") == {"step": 2, "batch_id": "b-2"}
    assert (resumed.digest(), resumed.updates) == (first.digest(), 2)
    assert train(resumed, range(2, 4)) == uninterrupted


def test_random_state_is_part_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    policy = backend(checkpoint)
    policy.save(tmp_path / "saved", {})
    drawn = torch.rand(4)
    policy.load(tmp_path / "saved")
    assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "sat", "sat_gspo"])
def test_micro_batches_do_not_change_the_step(checkpoint: Path, loss: str) -> None:
    whole, cut = backend(checkpoint), backend(checkpoint)
    bound = build_loss(loss)
    parts = packed(max_tokens=20)
    assert len(parts) > 2
    one = whole.train_step(packed(), bound, entropy_bonus=0.04)
    many = cut.train_step(parts, bound, entropy_bonus=0.04)
    assert many.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-6)
    for left, right in zip(whole._parameters.values(), cut._parameters.values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_update_raises_the_probability_of_rewarded_tokens(checkpoint: Path) -> None:
    rewarded = [replace(s, advantage=1.0) for s in tiny_policy.sequences()]
    policy = backend(checkpoint)
    (batch,) = packed(rewarded)
    before = policy.score(batch).sum()
    for _ in range(5):
        policy.train_step([batch], build_loss("ppo", {"denominator": "prox"}))
    assert policy.score(batch).sum() > before + 5


def test_entropy_bonus_raises_entropy(checkpoint: Path) -> None:
    def entropy_after(bonus: float) -> float:
        policy = backend(checkpoint)
        batches = packed()
        for _ in range(5):
            policy.train_step(batches, build_loss("ppo"), entropy_bonus=bonus)
        return policy.train_step(batches, build_loss("ppo")).metrics["entropy"]

    assert entropy_after(1.0) > entropy_after(0.0)


def test_learning_rate_warms_up_and_stays() -> None:
    assert [OptimizerSettings(learning_rate=1.0, warmup_steps=4).rate(n) for n in range(6)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
    ]


def test_step_without_trainable_tokens_changes_nothing(checkpoint: Path) -> None:
    policy = backend(checkpoint)
    train(policy, range(1))
    before = policy.digest()
    hidden = [replace(s, mask=np.zeros_like(s.mask)) for s in tiny_policy.sequences()]
    result = policy.train_step(packed(hidden), build_loss("sat"))
    assert policy.digest() == before
    assert (result.metrics["updated"], policy.updates) == (0, 1)


def test_gradient_that_is_not_finite_is_refused_before_the_weights_change(checkpoint: Path) -> None:
    policy = backend(checkpoint)
    before = policy.digest()
    broken = [replace(s, advantage=float("inf")) for s in tiny_policy.sequences()]
    with pytest.raises(InvariantBroken):
        policy.train_step(packed(broken), build_loss("ppo"))
    assert (policy.digest(), policy.updates) == (before, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_a_standard_checkpoint_of_the_present_weights(tmp_path: Path, tied: bool) -> None:
    initial = tiny_policy.write_checkpoint(tmp_path / "initial", tied=tied)
    policy = backend(initial)
    digest = train(policy, range(2))
    policy.export(tmp_path / "exported")
    again = backend(tmp_path / "exported")
    assert again.digest() == digest
    assert (tmp_path / "exported" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_export_twice_leaves_one_whole_directory(checkpoint: Path, tmp_path: Path) -> None:
    policy = backend(checkpoint)
    policy.export(tmp_path / "exported")
    digest = train(policy, range(1))
    policy.export(tmp_path / "exported")
    assert backend(tmp_path / "exported").digest() == digest
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_changed_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    policy = backend(checkpoint)
    policy.save(tmp_path / "saved", {})
    weights = tmp_path / "saved" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CorruptPayload):
        policy.load(tmp_path / "saved")


def test_checkpoint_that_is_not_there_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptPayload):
        backend(checkpoint).load(tmp_path / "none")
    with pytest.raises(ConfigError):
        backend(tmp_path)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As a full disk: no file of this process may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [lambda policy, path: policy.save(path, {}), TorchBackend.export])
def test_disk_that_is_full_is_named_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, write: Callable[[TorchBackend, Path], None]
) -> None:
    policy = backend(checkpoint)
    with file_size_limit(4000), pytest.raises(StoreError):
        write(policy, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def write_half(target: Path) -> None:
    with atomic_directory(target) as directory:
        (directory / "file").write_text("new")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_write_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    with atomic_directory(target) as directory:
        (directory / "file").write_text("old")
    with pytest.raises(StoreError):
        write_half(target)
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
