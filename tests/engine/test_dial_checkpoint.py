"""The Dial policy is what the task's measurements were made with."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from stack.models.dial import write_dial_checkpoint


def test_it_has_111k_parameters_and_a_small_head(dial: Path) -> None:
    tensors = load_file(dial / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == 110_976
    assert tensors["lm_head.weight"].equal(0.02 * tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("model.embed_tokens.weight", 1.0),
        ("model.layers.0.self_attn.q_proj.weight", 64**-0.5),
        ("model.layers.1.self_attn.o_proj.weight", 64**-0.5 / 2),
        ("model.layers.0.mlp.up_proj.weight", 64**-0.5),
        ("model.layers.1.mlp.down_proj.weight", 192**-0.5 / 2),
    ],
)
def test_initial_scales(dial: Path, name: str, scale: float) -> None:
    tensor = load_file(dial / "model.safetensors")[name]
    assert tensor.std().item() == pytest.approx(scale, rel=0.06)


def test_a_seed_means_the_same_weights(dial: Path, tmp_path: Path) -> None:
    again = write_dial_checkpoint(tmp_path / "a", seed=0) / "model.safetensors"
    other = write_dial_checkpoint(tmp_path / "b", seed=1) / "model.safetensors"
    assert again.read_bytes() == (dial / "model.safetensors").read_bytes()
    assert other.read_bytes() != again.read_bytes()
