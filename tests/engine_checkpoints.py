"""Checkpoints with which an engine's doings can be seen in its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_always(directory: Path, dial: Path, token: int) -> Path:
    """A checkpoint of the architecture of `dial` that is certain of one token: every embedding is the same vector, the layers
    write nothing, and the head gives that token a large logit. With it, a change of weights shows in the tokens themselves.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = load_file(dial / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"].fill_(1.0)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    tensors["lm_head.weight"][token] = 1.0
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((dial / "config.json").read_bytes())
    return directory
