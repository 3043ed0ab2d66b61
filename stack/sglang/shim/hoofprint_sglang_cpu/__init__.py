"""SGLang plugin: two places where its CPU path still reaches for CUDA or for a compiled kernel, in pure torch.

Every process of SGLang loads it (entry point group `sglang.srt.plugins`). Both places are of mixture-of-experts models: the
host buffer of routed experts, which would be pinned through the CUDA runtime, and the router's top-k.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def activate() -> None:
    """Called by SGLang at the start of each process; does nothing on a GPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.layers.moe import topk
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    topk.topk_softmax = route


def allocate(dims: Sequence[int], dtype: Any, *rest: Any, **more: Any) -> Any:
    """Plain memory of this shape."""
    import torch

    return torch.empty(tuple(dims), dtype=dtype, device="cpu")


def route(
    weights: Any, experts: Any, logits: Any, renormalize: bool = False, *rest: Any, **more: Any
) -> None:
    """Fill `weights` and `experts` [tokens, k] with the k most probable experts of `logits` [tokens, experts]."""
    probabilities = logits.float().softmax(dim=-1)
    best, chosen = probabilities.topk(experts.shape[-1], dim=-1)
    if renormalize:
        best = best / best.sum(dim=-1, keepdim=True)
    weights.copy_(best)
    experts.copy_(chosen)
