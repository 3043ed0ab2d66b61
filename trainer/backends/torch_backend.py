"""Training in plain torch: any Hugging Face causal LM directory, one process, float32, Adam.

The batch is consumed by exactly one update, so the proximal policy of a loss that wants one is the policy
before the update, and its log-probs are the detached current ones. SAT's bandwidth needs all tokens of the
step: with one micro-batch the loss takes it from that batch; with several, all are scored first.

Dropout stays off: the trainer's log-probs must be those of the weights that the engine serves.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schemas.errors import ConfigError, InvariantBroken
from trainer.backends.checkpoint import parameters_digest, read_checkpoint, read_meta, write_checkpoint
from trainer.backends.contract import OptimizerSettings, StepResult, TokenFacts
from trainer.backends.durable import atomic_directory
from trainer.backends.forward import Forward, packed_forward
from trainer.losses.contract import Loss, LossInputs, LossOutputs, combine_metrics
from trainer.losses.drift import mismatch_metrics
from trainer.packing import PackedBatch

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
WRITTEN_BY_EXPORT = ("config.json", "generation_config.json")


def make_deterministic(*, seed: int, threads: int) -> None:
    """Process-wide.

    Seed torch, fix the number of threads (sums depend on it), refuse kernels that do not repeat.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


class TorchBackend:
    """One policy with its optimizer.

    See `trainer.backends.contract.Backend` for what each method promises.
    """

    def __init__(
        self,
        checkpoint: Path,
        optimizer: OptimizerSettings,
        *,
        temperature: float = 1.0,
        device: str = "cpu",
        attention: Literal["eager", "sdpa"] = "sdpa",
        sync: bool = True,
    ) -> None:
        self._source = checkpoint
        self._settings = optimizer
        self._temperature = temperature
        self._sync = sync
        self._model = _load_model(checkpoint, device, attention)
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())  # tied ones once
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self._updates = 0
        self._digest: str | None = None  # of the present weights, once somebody asked

    @property
    def updates(self) -> int:
        """Optimizer updates so far, those before the loaded checkpoint included."""
        return self._updates

    def score(self, batch: PackedBatch) -> NDArray[np.float32]:
        """Log-probs [N] of the trainable tokens, no gradient."""
        return _numpy(self._score(batch))

    def train_step(
        self, micro_batches: Sequence[PackedBatch], loss: Loss, *, entropy_bonus: float = 0.0
    ) -> StepResult:
        """Accumulate the gradient over all micro-batches, clip it, update once.

        A step without any trainable token changes nothing (Adam would move on its momentum). Raises
        InvariantBroken, before the weights change, when the gradient is not finite.
        """
        trainable = [batch for batch in micro_batches if batch.active]
        bandwidth = self._bandwidth(trainable, loss) if len(trainable) > 1 else None
        self._optimizer.zero_grad(set_to_none=True)
        facts, parts, total = [], [], 0.0
        for batch in micro_batches:
            if not batch.active:
                facts.append(_no_facts(batch))
                continue
            forward, outputs, objective = self._backward(batch, loss, bandwidth, entropy_bonus)
            facts.append(
                TokenFacts(_numpy(forward.logp), _numpy(forward.entropy), outputs.clipped.cpu().numpy())
            )
            metrics = outputs.metrics | {"entropy": float(forward.entropy.detach().sum()) / batch.active}
            parts.append((metrics, batch.active, batch.active_sequences))
            total += objective
        step = (
            combine_metrics(parts)
            | _mismatch(micro_batches, facts)
            | {
                "loss": total,
                "trainable_tokens": float(sum(tokens for _, tokens, _ in parts)),
                "trainable_sequences": float(sum(sequences for _, _, sequences in parts)),
                "updated": float(bool(trainable)),
            }
        )
        return StepResult(step | (self._update() if trainable else {}), facts)

    def digest(self) -> str:
        """sha256 over all parameters: sorted names and raw bytes."""
        if self._digest is None:
            self._digest = parameters_digest(self._parameters)
        return self._digest

    def save(self, path: Path, meta: Mapping[str, object]) -> None:
        """Durable checkpoint at `path`; `meta` comes back from `load`. StoreError when the disk refuses."""
        stored = {"digest": self.digest(), "updates": self._updates, "meta": dict(meta)}
        with atomic_directory(path, sync=self._sync) as directory:
            write_checkpoint(directory, self._parameters, self._optimizer, stored)

    def load(self, path: Path) -> dict[str, object]:
        """Continue from the checkpoint at `path`; the meta that was saved with it."""
        stored = read_meta(path)
        digest, updates, meta = stored.get("digest"), stored.get("updates"), stored.get("meta")
        if not isinstance(digest, str) or not isinstance(updates, int) or not isinstance(meta, dict):
            raise ConfigError("meta.json is not a checkpoint's", path=str(path))
        self._digest = None
        read_checkpoint(path, self._parameters, self._optimizer, digest)
        self._updates = updates
        return meta

    def export(self, path: Path) -> None:
        """Standard checkpoint at `path`: config and safetensors of now, all other files as in the source."""
        with atomic_directory(path, sync=self._sync) as directory:
            self._model.save_pretrained(directory)
            for file in sorted(self._source.iterdir()):
                copied = file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES)
                if copied and file.name not in WRITTEN_BY_EXPORT:
                    shutil.copyfile(file, directory / file.name)

    def _score(self, batch: PackedBatch) -> Tensor:
        if not batch.active:
            return torch.zeros(len(batch.tokens), device=self._model.device)
        with torch.no_grad():
            return packed_forward(self._model, batch, temperature=self._temperature, entropy_grad=False).logp

    def _bandwidth(self, batches: Sequence[PackedBatch], loss: Loss) -> float | None:
        if loss.bandwidth is None:
            return None
        parts = [self._inputs(batch, self._score(batch), None) for batch in batches]
        offsets = np.cumsum([0] + [part.num_sequences for part in parts])
        whole = LossInputs(
            logp=torch.cat([part.logp for part in parts]),
            logp_rollout=torch.cat([part.logp_rollout for part in parts]),
            advantages=torch.cat([part.advantages for part in parts]),
            mask=torch.cat([part.mask for part in parts]),
            sequence_ids=torch.cat([p.sequence_ids + int(o) for p, o in zip(parts, offsets, strict=False)]),
            num_sequences=int(offsets[-1]),
        )
        return loss.bandwidth(whole)

    def _backward(
        self, batch: PackedBatch, loss: Loss, bandwidth: float | None, entropy_bonus: float
    ) -> tuple[Forward, LossOutputs, float]:
        forward = packed_forward(
            self._model, batch, temperature=self._temperature, entropy_grad=entropy_bonus != 0
        )
        inputs = self._inputs(batch, forward.logp, bandwidth)
        outputs = loss.evaluate(inputs)
        weights = self._tensor(batch.weights)
        objective = (weights * (outputs.per_token_loss - entropy_bonus * forward.entropy)).sum()
        objective.backward()  # type: ignore[no-untyped-call]
        return forward, outputs, float(objective.detach())

    def _update(self) -> dict[str, float]:
        norm = float(
            torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), self._settings.max_grad_norm)
        )
        if not np.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise InvariantBroken("the gradient is not finite", grad_norm=str(norm), updates=self._updates)
        rate = self._settings.rate(self._updates)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._digest = None
        self._optimizer.step()
        self._updates += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def _inputs(self, batch: PackedBatch, logp: Tensor, bandwidth: float | None) -> LossInputs:
        return LossInputs(
            logp=logp,
            logp_rollout=self._tensor(batch.rollout_logprobs),
            logp_prox=logp.detach(),
            advantages=self._tensor(batch.advantages),
            mask=torch.from_numpy(batch.mask).to(self._model.device),
            sequence_ids=torch.from_numpy(batch.sequence_ids).to(self._model.device),
            num_sequences=batch.num_sequences,
            bandwidth=bandwidth,
        )

    def _tensor(self, column: NDArray[Any]) -> Tensor:
        return torch.from_numpy(column.astype(np.float32)).to(self._model.device)


def _load_model(checkpoint: Path, device: str, attention: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not (checkpoint / "config.json").is_file():
        raise ConfigError(f"{checkpoint} is not a checkpoint directory: no config.json", path=str(checkpoint))
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    )
    return model.to(device).eval()


def _mismatch(batches: Sequence[PackedBatch], facts: Sequence[TokenFacts]) -> dict[str, float]:
    """Over all tokens of the step at once: an effective sample size is no mean over micro-batches."""
    if not batches:
        return {}
    offsets = np.cumsum([0] + [batch.num_sequences for batch in batches])
    return mismatch_metrics(
        np.concatenate([fact.logprobs for fact in facts]),
        np.concatenate([batch.rollout_logprobs for batch in batches]),
        np.concatenate([batch.mask for batch in batches]),
        np.concatenate([b.sequence_ids + o for b, o in zip(batches, offsets, strict=False)]),
    )


def _no_facts(batch: PackedBatch) -> TokenFacts:
    zeros = np.zeros(len(batch.tokens), dtype=np.float32)
    return TokenFacts(zeros, zeros, np.zeros(len(batch.tokens), dtype=np.bool_))


def _numpy(tensor: Tensor) -> NDArray[np.float32]:
    return np.asarray(tensor.detach().cpu().numpy(), dtype=np.float32)
