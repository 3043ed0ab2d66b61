"""The forward pass against transformers, over every way to split a sequence into prefill and decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from stack.engine.checkpoint import read_spec, read_weights
from stack.engine.kvcache import KVCache
from stack.engine.model import CausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MOE = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-rope3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "moe-unnormalised": ("Qwen3Moe", {**MOE, "norm_topk_prob": False}),
    "moe-some-dense": ("Qwen3Moe", {**MOE, "mlp_only_layers": [0], "num_hidden_layers": 4}),
    "moe-every-second": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 2}),
    "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


@pytest.fixture(params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    import transformers

    family, options = VARIANTS[request.param]
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 90,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            **options,
        }
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    return tmp_path


def reference_logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits


def load(directory: Path) -> CausalLM:
    spec = read_spec(directory)
    return CausalLM(spec, read_weights(directory, spec))


def test_prefill_then_decode_gives_the_logits_of_transformers(checkpoint: Path) -> None:
    ids = torch.randint(0, 90, (3, 24), generator=torch.Generator().manual_seed(0))
    model = load(checkpoint)
    cache = KVCache(model.spec, slots=8, positions=32)
    with torch.inference_mode():
        parts = [model.forward(ids[:, :9], torch.zeros(3, dtype=torch.long), 9, cache, 2)]
        parts += [model.forward(ids[:, 9:17], torch.full((3,), 9), 17, cache, 2)]
        parts += [
            model.forward(ids[:, i : i + 1], torch.full((3,), i), i + 1, cache, 2) for i in range(17, 24)
        ]
        logits = model.logits(torch.cat(parts, 1))
    torch.testing.assert_close(logits, reference_logits(checkpoint, ids), atol=1e-4, rtol=1e-4)


def test_rows_of_unequal_length_do_not_see_each_other(dial: Path) -> None:
    model = load(dial)
    lengths = torch.tensor([3, 17, 9])
    ids = torch.randint(0, 32, (3, 18), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.spec, slots=4, positions=32)
    with torch.inference_mode():
        model.forward(ids[:, :17], torch.zeros(3, dtype=torch.long), 17, cache, 0)
        token = ids.gather(1, lengths[:, None])
        together = model.logits(model.forward(token, lengths, 18, cache, 0))[:, 0]
    for row, length in enumerate(lengths.tolist()):
        alone = reference_logits(dial, ids[row : row + 1, : length + 1])[0, -1]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-5)


def test_growing_the_cache_keeps_what_is_in_it(dial: Path) -> None:
    model = load(dial)
    ids = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.spec, slots=2, positions=8)
    with torch.inference_mode():
        model.forward(ids[:, :8], torch.zeros(2, dtype=torch.long), 8, cache, 0)
        cache.reserve(5, 100, used_slots=2, used_positions=8)
        logits = model.logits(model.forward(ids[:, 8:], torch.full((2,), 8), 12, cache, 0))
    assert (cache.slots, cache.positions) == (8, 128)
    torch.testing.assert_close(logits, reference_logits(dial, ids)[:, 8:], atol=1e-5, rtol=1e-5)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        read_spec(tmp_path)


def test_a_missing_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        read_spec(tmp_path / "nowhere")


def test_a_tensor_of_another_shape_is_refused(dial: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(dial / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \(3,\), not \(64,\)"):
        read_weights(tmp_path, read_spec(dial))
