"""Run the known tokens of admitted requests and sample their first (or, after a retraction, next) token.

Requests with the same tokens (the samples of one prompt group) are computed once: the others copy the
cached keys and values. Long prompts run in chunks, so that the attention mask stays small. Rows are padded
on the right; what padding writes lies above the row's length and is never seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stack.engine.batch import Batch
from stack.engine.generation import Generation
from stack.engine.model import CausalLM

CHUNK = 512
TOKEN_BUDGET = 4096
"""Padded tokens of one prefill: bounds its memory, and how long the running rows wait for it."""


def take_admissible(waiting: list[Generation], free_rows: int) -> list[Generation]:
    """The longest head of the queue that fits into the free rows and the token budget (at least one
    request)."""
    count, longest = 0, 0
    for generation in waiting[:free_rows]:
        longest = max(longest, len(generation.prompt) + len(generation.output_ids))
        if count and (count + 1) * longest > TOKEN_BUDGET:
            break
        count += 1
    return waiting[:count]


def prefill(model: CausalLM, batch: Batch, admitted: list[Generation]) -> None:
    """Append the admitted requests to the batch with their next token sampled; scoring calls end with
    none."""
    first = len(batch)
    unique: dict[tuple[int, ...], int] = {}
    tokens_of = [tuple(g.tokens) for g in admitted]
    order = [unique.setdefault(tokens, len(unique)) for tokens in tokens_of]
    sequences = list(unique)
    longest = max(map(len, sequences))
    # Shared sequences run in slots behind the rows' own and are copied from there; otherwise each runs in place.
    shared = len(sequences) < len(admitted)
    base = first + len(admitted) if shared else first
    batch.reserve(base + len(sequences), longest)
    hidden = _run(model, batch, sequences, longest, base)
    ends = torch.tensor([len(s) - 1 for s in sequences])
    logits = model.logits(hidden[torch.arange(len(sequences)), ends])
    for row, (generation, source) in enumerate(zip(admitted, order, strict=True)):
        length = len(sequences[source])
        if shared:
            batch.cache.move(base + source, first + row, length)
        if generation.logprob_start >= 0 and generation.prompt_logprobs is None:
            generation.prompt_logprobs = _prompt_logprobs(model, hidden[source], generation)
        batch.add(generation, length)
    batch.sample(logits[torch.tensor(order)] if shared else logits, first)


def _run(
    model: CausalLM, batch: Batch, sequences: list[tuple[int, ...]], longest: int, first_slot: int
) -> Tensor:
    padded = torch.tensor([s + (0,) * (longest - len(s)) for s in sequences])
    parts = []
    for start in range(0, longest, CHUNK):
        chunk = padded[:, start : start + CHUNK]
        starts = torch.full((len(sequences),), start)
        parts.append(model.forward(chunk, starts, start + chunk.shape[1], batch.cache, first_slot))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _prompt_logprobs(model: CausalLM, hidden_te: Tensor, generation: Generation) -> list[float]:
    """log p of prompt tokens after `logprob_start`, at temperature 1 (SGLang does not scale prompt
    log-probs)."""
    start, prompt = generation.logprob_start, generation.prompt
    found: list[float] = []
    for low in range(start, len(prompt) - 1, CHUNK):
        high = min(low + CHUNK, len(prompt) - 1)
        logprobs = torch.log_softmax(model.logits(hidden_te[low:high]), -1)
        targets = torch.tensor(prompt[low + 1 : high + 1])
        found += logprobs.gather(1, targets[:, None]).squeeze(1).tolist()
    return found
