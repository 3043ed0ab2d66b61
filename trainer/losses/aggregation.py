"""How per-token losses become one number: one weight per sequence, from counts of the whole optimizer step.

The loss of a step is `sum over tokens of weight[sequence] * per_token_loss`. The weights are computed once,
over all sequences of the step, before anything is cut into micro-batches or sharded over ranks. So partial
sums just add up (gradients of ranks are summed, never averaged), and no cut can change the result.

Sequences without a trainable token have weight 0 and are not counted, except by `constant`, whose normaliser
is the number of all sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant", "prompt_equal"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def prompt_equal_denominators(
    active: Sequence[int], prompts: Sequence[Hashable], global_batch_size: int
) -> NDArray[np.float64]:
    """M_P * N / global_batch_size per sequence: every prompt weighs the same, however many lineages it split
    into.

    M_P: trainable tokens of the sequence's prompt over all its sequences; N: prompts with a trainable token.
    """
    per_prompt: dict[Hashable, int] = {}
    for count, prompt in zip(active, prompts, strict=True):
        per_prompt[prompt] = per_prompt.get(prompt, 0) + int(count)
    live_prompts = sum(1 for tokens in per_prompt.values() if tokens > 0)
    return np.array([per_prompt[p] * live_prompts / global_batch_size for p in prompts], dtype=np.float64)


def sequence_weights(
    aggregation: str,
    active: Sequence[int],
    prompts: Sequence[Hashable],
    *,
    constant_length: int | None = None,
) -> NDArray[np.float64]:
    """Weight of every token's loss, per sequence [S], float64.

    `active` [S]: trainable tokens of each sequence of the step; `prompts` [S]: its prompt. `constant_length`
    is the L of `constant` (Dr.GRPO: sum / (sequences * L)).
    """
    counts = np.asarray(active, dtype=np.float64)
    live = counts > 0
    if not live.any():
        return np.zeros(len(counts))
    match aggregation:
        case "token_mean":
            divisor = np.full_like(counts, counts.sum())
        case "seq_mean_token_sum":
            divisor = np.full_like(counts, live.sum())
        case "seq_mean_token_mean":
            divisor = counts * live.sum()
        case "constant":
            if constant_length is None or constant_length < 1:
                raise ConfigError(
                    "aggregation 'constant' needs constant_length >= 1", constant_length=constant_length
                )
            divisor = np.full_like(counts, len(counts) * constant_length)
        case "prompt_equal":
            divisor = prompt_equal_denominators(active, prompts, len(counts)) * len(counts)
        case _:
            known = ", ".join(AGGREGATIONS)
            raise ConfigError(
                f"unknown aggregation {aggregation!r}; known: {known}", known=list(AGGREGATIONS)
            )
    return np.divide(1.0, divisor, out=np.zeros_like(counts), where=live)
