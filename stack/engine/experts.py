"""Mixture of experts as Qwen3-MoE has it: a router's softmax, its k most probable experts, their weighted sum.

Which experts a position was routed to is kept with its keys and values, in one more key-value head (numbers up to 2^24 are
exact in float32): so the routes of a prefix come back with the prefix, as in SGLang. Layers without experts have zeros
there, as SGLang's buffer does.
"""

from __future__ import annotations

import base64

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def mix(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, *, top_k: int, normalise: bool
) -> tuple[Tensor, Tensor]:
    """(…, E) to (…, E), and the chosen experts (…, top_k). Weights: router (X, E), gate_up (X, 2I, E), down (X, E, I)."""
    flat = x.reshape(-1, x.shape[-1])
    probabilities = torch.softmax(functional.linear(flat, router), -1)
    weights, chosen = probabilities.topk(top_k, -1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = torch.where(chosen == expert)
        gate, up = functional.linear(flat[rows], gate_up[expert]).chunk(2, -1)
        part = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, rows, part * weights[rows, places, None])
    return out.view(x.shape), chosen.view(*x.shape[:-1], top_k)


def encode_routes(routes_pln: Tensor, start: int) -> str:
    """SGLang's `routed_experts`: base64 of int32 rows from position `start` on. Routes are (positions, layers, top_k)."""
    rows = routes_pln[start:].numpy().astype("<i4")
    return base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode()
