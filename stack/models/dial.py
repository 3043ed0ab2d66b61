"""The untrained policy of the Dial task: a tiny Qwen3 checkpoint of 111k parameters.

The directory is what `save_pretrained` writes, so our CPU engine, SGLang, vLLM and the trainer all read it.
The initialisation is part of the task: embedding N(0, 1); every matrix N(0, 1/fan_in); what writes into the
residual stream (`o_proj`, `down_proj`) is divided by sqrt(2 * layers); the output head is 0.02 * embedding,
which makes the first policy nearly uniform. The same seed gives the same bytes of weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

HIDDEN: Final = 64
LAYERS: Final = 2
HEADS: Final = 4
VOCABULARY: Final = 32
"""25 ids are used by the task; 32 keeps the matrices round."""
CONTEXT: Final = 512
HEAD_SCALE: Final = 0.02


def write_dial_checkpoint(path: Path, seed: int) -> Path:
    """Write the checkpoint of `seed` into the directory `path` and return it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: Any = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        _initialise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(path)
    return path


def _initialise(model: Any, generator: Any) -> None:
    """Fill the parameters in the order of their names, so that a seed means the same weights everywhere."""
    parameters = dict(model.named_parameters())
    for name in sorted(parameters):
        tensor = parameters[name]
        if tensor.dim() == 1 or name == "lm_head.weight":
            continue  # norms stay 1; the head is derived below
        is_embedding = name == "model.embed_tokens.weight"
        scale = 1.0 if is_embedding else 1.0 / math.sqrt(tensor.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(2 * LAYERS)
        tensor.normal_(0.0, scale, generator=generator)
    parameters["lm_head.weight"].copy_(HEAD_SCALE * parameters["model.embed_tokens.weight"])
