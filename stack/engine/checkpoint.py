"""Read a Hugging Face checkpoint directory (config.json, safetensors) of the Llama or Qwen3 family (Qwen3-MoE too).

Why not `transformers`: importing it costs seconds, and the engine reads a new checkpoint at every weight
update. Weights are kept in the form that the forward pass wants: float32; q, k and v in one matrix, gate
and up in one; the dimensions of each q and k head in interleaved order, so that the rotary embedding is one
complex product (scores do not change when both sides are permuted alike). Tensors are always copies: the
file may be replaced while the engine runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from schemas.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the forward pass must know of a checkpoint; equal specs can replace each other."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_type: str
    rope_factor: float
    rope_low_freq_factor: float
    rope_high_freq_factor: float
    rope_original_context: int
    context_length: int
    tied: bool
    eos_token_ids: frozenset[int]
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: frozenset[int] = frozenset()
    normalise_experts: bool = False
    """Whether the weights of the chosen experts sum to 1."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qk_norm` is (heads + kv_heads, head_dim), absent for Llama. With a `router`, `gate_up` and `down`
    have one matrix per expert."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters, float32."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def read_spec(directory: Path) -> ModelSpec:
    """Read and check `config.json`, with `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    config = _read_json(directory / "config.json")
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{directory} holds {architecture}; the CPU engine serves {', '.join(ARCHITECTURES)}.",
            architecture=architecture,
        )
    if (
        config.get("hidden_act", "silu") != "silu"
        or config.get("use_sliding_window")
        or config.get("mlp_bias")
    ):
        raise ConfigError(f"{directory}: only silu, full attention and an MLP without bias are supported.")
    heads = int(config["num_attention_heads"])
    rope = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config.get("rope_theta"),
    }
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "linear", "llama3"):
        raise ConfigError(f"{directory}: rope type {rope_type} is not supported.", rope_type=rope_type)
    context = int(config.get("max_position_embeddings", 2048))
    spec = ModelSpec(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rope_type=rope_type,
        rope_factor=float(rope.get("factor") or 1.0),
        rope_low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        rope_high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        rope_original_context=int(rope.get("original_max_position_embeddings") or context),
        context_length=context,
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_end_tokens(directory, config),
        **_experts(config, architecture),
    )
    if spec.experts_per_token > spec.head_dim:
        raise ConfigError(f"{directory}: more experts per token than a head has dimensions.")
    return spec


def _experts(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    count = config.get("num_experts") or config.get("num_local_experts")  # the newer name is the second
    if architecture != "Qwen3MoeForCausalLM" or not count:
        return {}
    dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step") or 1)
    layers = range(int(config["num_hidden_layers"]))
    return {
        "experts": int(count),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_layers": frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
        "normalise_experts": bool(config.get("norm_topk_prob", False)),
    }


def read_weights(directory: Path, spec: ModelSpec) -> Weights:
    """Load every tensor that `spec` asks for; a missing one or a wrong shape is a `ConfigError`."""
    tensors = _read_tensors(directory)

    def take(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise ConfigError(f"{directory} has no tensor {name}.", tensor=name)
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{directory}: {name} is {tuple(tensor.shape)}, not {shape}.",
                tensor=name,
                shape=list(tensor.shape),
            )
        return tensor.to(torch.float32, copy=True).contiguous()

    embedding = take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    tied = spec.tied or "lm_head.weight" not in tensors
    return Weights(
        embedding=embedding,
        layers=tuple(_read_layer(i, spec, take, tensors) for i in range(spec.layers)),
        norm=take("model.norm.weight", spec.hidden_size),
        head=embedding if tied else take("lm_head.weight", spec.vocab_size, spec.hidden_size),
    )


def _read_layer(
    index: int, spec: ModelSpec, take: Callable[..., Tensor], tensors: dict[str, Tensor]
) -> LayerWeights:
    prefix, width, dim = f"model.layers.{index}.", spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.heads * dim, spec.kv_heads * dim
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    experts = [f"{mlp}experts.{i}." for i in range(spec.experts)] if index in spec.expert_layers else []
    parts = [_read_mlp(part, width, take, tensors) for part in experts or [mlp]]
    bias: Tensor | None = None
    if f"{attention}q_proj.bias" in tensors:
        bias = torch.cat(
            [
                _interleave(take(f"{attention}q_proj.bias", q_rows), dim),
                _interleave(take(f"{attention}k_proj.bias", kv_rows), dim),
                take(f"{attention}v_proj.bias", kv_rows),
            ]
        )
    qk_norm: Tensor | None = None
    if spec.architecture != "LlamaForCausalLM":
        q_norm = _interleave(take(f"{attention}q_norm.weight", dim), dim)
        k_norm = _interleave(take(f"{attention}k_norm.weight", dim), dim)
        qk_norm = torch.cat([q_norm.expand(spec.heads, dim), k_norm.expand(spec.kv_heads, dim)])
    has_output_bias = f"{attention}o_proj.bias" in tensors
    return LayerWeights(
        attention_norm=take(f"{prefix}input_layernorm.weight", width),
        qkv=torch.cat(
            [
                _interleave(take(f"{attention}q_proj.weight", q_rows, width), dim),
                _interleave(take(f"{attention}k_proj.weight", kv_rows, width), dim),
                take(f"{attention}v_proj.weight", kv_rows, width),
            ]
        ),
        qkv_bias=bias,
        qk_norm=qk_norm,
        output=take(f"{attention}o_proj.weight", width, q_rows),
        output_bias=take(f"{attention}o_proj.bias", width) if has_output_bias else None,
        mlp_norm=take(f"{prefix}post_attention_layernorm.weight", width),
        gate_up=torch.stack([p[0] for p in parts]) if experts else parts[0][0],
        down=torch.stack([p[1] for p in parts]) if experts else parts[0][1],
        router=take(f"{mlp}gate.weight", spec.experts, width) if experts else None,
    )


def _read_mlp(
    prefix: str, width: int, take: Callable[..., Tensor], tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Gate and up in one matrix, and down, of a whole MLP or of one expert."""
    gate = f"{prefix}gate_proj.weight"
    inner = tensors[gate].shape[0] if gate in tensors else 0
    gate_up = torch.cat([take(gate, inner, width), take(f"{prefix}up_proj.weight", inner, width)])
    return gate_up, take(f"{prefix}down_proj.weight", width, inner)


def _interleave(rows: Tensor, dim: int) -> Tensor:
    """Reorder each head's rows from two halves, as checkpoints have them, to pairs side by side."""
    halves = rows.view(-1, 2, dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    names = (
        sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(directory / name))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {directory / name}: {error}") from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error


def _end_tokens(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """End ids of both configs: chat models often name their end mark in generation_config.json alone."""
    generation = directory / "generation_config.json"
    found: set[int] = set()
    for source in (config, _read_json(generation) if generation.is_file() else {}):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
