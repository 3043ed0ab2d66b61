"""A tiny Qwen3 checkpoint and a random but fixed batch for it, made in the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.packing import TrainSequence

VOCABULARY = 32


def write_checkpoint(directory: Path, *, tied: bool = False) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model: Any = Qwen3ForCausalLM
    model(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return directory


def sequences(count: int = 6, *, seed: int = 0) -> list[TrainSequence]:
    """Random tokens with holes in the mask, stale log-probs around a uniform policy, alternating
    advantages.
    """
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(random.integers(6, 14))
        mask = (random.random(length) < 0.7).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        logprobs = np.where(mask != 0, random.normal(-np.log(VOCABULARY), 0.3, length), 0)
        made.append(
            TrainSequence(
                key=f"lineage-{index}",
                prompt=f"group-{index // 3}",
                tokens=random.integers(0, VOCABULARY, length).astype(np.int32),
                mask=mask,
                rollout_logprobs=logprobs.astype(np.float32),
                versions=np.where(mask != 0, 1, -1).astype(np.int32),
                advantage=1.0 if index % 2 else -1.0,
            )
        )
    return made
