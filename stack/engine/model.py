"""The forward pass of Llama, Qwen3 and Qwen3-MoE on CPU, over slots of a `KVCache`.

One function serves prefill and decode: row b brings T tokens whose first position is `start[b]`; keys and
values are written at their positions, and each query sees the keys at and before its own position.
Suffixes: B rows, T new tokens, L cached positions, E hidden size, H query heads, K key-value heads, G = H /
K, D head size, N rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from stack.engine.checkpoint import LayerWeights, ModelSpec, Weights
from stack.engine.experts import mix
from stack.engine.kvcache import KVCache


class CausalLM:
    """A checkpoint ready to run; immutable but for the rotary table, which grows with the contexts."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self._frequencies = rope_frequencies(spec)
        self._rotation = self._rotation_table(256)

    def forward(
        self, tokens_bt: Tensor, start_b: Tensor, width: int, cache: KVCache, first_slot: int
    ) -> Tensor:
        """Run rows `first_slot..first_slot+B` and return the normed hidden states (B, T, E).

        `width` = max(start) + T, which the cache must already have room for.
        """
        rows, new = tokens_bt.shape
        if width > len(self._rotation):
            self._rotation = self._rotation_table(2 * width)
        positions_bt = start_b[:, None] + torch.arange(new)
        rotation = self._rotation[positions_bt].unsqueeze(2)
        mask = (
            None
            if rows == 1 and new == 1
            else _visible(positions_bt, width, self.spec.heads // self.spec.kv_heads)
        )
        slots_b1 = torch.arange(first_slot, first_slot + rows)[:, None]
        x = self.weights.embedding[tokens_bt]
        heads = self.spec.kv_heads
        for layer, keys_values in zip(self.weights.layers, cache.data, strict=True):
            normed = self._norm(x, layer.attention_norm)
            q, k, v = self._project(normed, layer, rotation)
            keys_values[0][slots_b1, :heads, positions_bt] = k
            keys_values[1][slots_b1, :heads, positions_bt] = v
            seen = keys_values[:, first_slot : first_slot + rows, :heads, :width]
            x = x + functional.linear(self._attend(q, seen, mask), layer.output, layer.output_bias)
            normed = self._norm(x, layer.mlp_norm)
            if layer.router is None:
                gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
                x = x + functional.linear(functional.silu(gate) * up, layer.down)
            else:
                mixed, chosen = self._mix(normed, layer, layer.router)
                keys_values[0][slots_b1, heads, positions_bt, : chosen.shape[-1]] = chosen.float()
                x = x + mixed
        return self._norm(x, self.weights.norm)

    def _mix(self, x: Tensor, layer: LayerWeights, router: Tensor) -> tuple[Tensor, Tensor]:
        top_k, normalise = self.spec.experts_per_token, self.spec.normalise_experts
        return mix(x, router, layer.gate_up, layer.down, top_k=top_k, normalise=normalise)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, E) to (…, V)."""
        return functional.linear(hidden, self.weights.head)

    def _project(self, x: Tensor, layer: LayerWeights, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        rows, new = x.shape[:2]
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(rows, new, -1, spec.head_dim)
        turned = spec.heads + spec.kv_heads
        qk = qkv[:, :, :turned]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        pairs = torch.view_as_complex(qk.view(rows, new, turned, -1, 2))
        qk = torch.view_as_real(pairs * rotation).flatten(-2)
        return qk[:, :, : spec.heads], qk[:, :, spec.heads :], qkv[:, :, turned:]

    def _attend(self, q_bthd: Tensor, keys_values: Tensor, mask: Tensor | None) -> Tensor:
        """The G query heads of one key head become G·T queries of it: keys and values are not copied."""
        rows, new = q_bthd.shape[:2]
        spec = self.spec
        group = spec.heads // spec.kv_heads
        q = q_bthd.view(rows, new, spec.kv_heads, group, spec.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, spec.kv_heads, group * new, spec.head_dim)
        out = functional.scaled_dot_product_attention(q, keys_values[0], keys_values[1], attn_mask=mask)
        out = out.view(rows, spec.kv_heads, group, new, spec.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(rows, new, spec.heads * spec.head_dim)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps) * weight

    def _rotation_table(self, positions: int) -> Tensor:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self._frequencies)
        return torch.polar(torch.ones_like(angles), angles)


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """Angle per position of each pair of dimensions (D / 2): plain, linear, or Llama 3's bands."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    if spec.rope_type == "linear":
        return frequencies / spec.rope_factor
    if spec.rope_type == "default":
        return frequencies
    turns = spec.rope_original_context * frequencies / (2 * math.pi)
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / spec.rope_factor)


def _visible(positions_bt: Tensor, width: int, group: int) -> Tensor:
    """Additive mask (B, 1, G·T, L): 0 where the key is at or before the query, -inf after it."""
    hidden = torch.arange(width) > positions_bt[:, :, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return mask[:, None].expand(-1, group, -1, -1).reshape(mask.shape[0], 1, -1, width)
