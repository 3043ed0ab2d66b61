"""A tiny mixture-of-experts checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_moe(directory: Path, seed: int, dense: tuple[int, ...] = (1,)) -> Path:
    """A tiny random Qwen3-MoE checkpoint: 3 layers of 6 experts, 2 per token, but for the dense ones. Vocabulary 90."""
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=90, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2,
        mlp_only_layers=list(dense), norm_topk_prob=True, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    make: Any = transformers.Qwen3MoeForCausalLM
    model = make(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    model.save_pretrained(directory)
    return directory
