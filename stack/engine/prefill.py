"""Run the known tokens of admitted requests and sample their first (or, after a retraction, next) token.

What was computed before is not computed again: beginnings found in `Prefixes` are copied into the slot, and
requests with the same tokens (the samples of one prompt) are run once and copied. Long prompts run in
chunks, so that the attention mask stays small. Rows are padded on the right; what padding writes lies above
the row's length and is never seen. Requests of similar work run together, so that padding costs little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stack.engine.batch import Batch
from stack.engine.generation import Generation
from stack.engine.model import CausalLM
from stack.engine.prefixes import Prefixes

CHUNK = 512
TOKEN_BUDGET = 4096
"""Padded tokens of one prefill: bounds its memory, and how long the running rows wait for it."""


@dataclass(slots=True)
class _Sequence:
    """One distinct token sequence, and the requests that have it."""

    tokens: list[int]
    prefix: Tensor | None
    members: list[Generation]

    @property
    def known(self) -> int:
        return 0 if self.prefix is None else int(self.prefix.shape[3])

    @property
    def new(self) -> int:
        return len(self.tokens) - self.known


def take_admissible(waiting: list[Generation], free_rows: int) -> list[Generation]:
    """The longest head of the queue, at least one, that fits into the free rows and the token budget."""
    count, longest = 0, 0
    for generation in waiting[:free_rows]:
        longest = max(longest, len(generation.prompt) + len(generation.output_ids))
        if count and (count + 1) * longest > TOKEN_BUDGET:
            break
        count += 1
    return waiting[:count]


def prefill(model: CausalLM, batch: Batch, admitted: list[Generation], prefixes: Prefixes) -> None:
    """Append the admitted requests to the batch, their next token sampled; scoring calls take none."""
    for group in _groups(_sequences(admitted, prefixes)):
        _prefill_group(model, batch, group)


def _sequences(admitted: list[Generation], prefixes: Prefixes) -> list[_Sequence]:
    found: dict[tuple[int, ...], _Sequence] = {}
    for generation in admitted:
        tokens = generation.tokens
        scored = generation.logprob_start >= 0 and generation.prompt_logprobs is None
        key = (int(scored), *tokens)
        if key not in found:
            # Prompt log-probs need the hidden states of the whole prompt: nothing is reused there.
            found[key] = _Sequence(tokens, None if scored else prefixes.find(tokens), [])
        found[key].members.append(generation)
    return sorted(found.values(), key=lambda sequence: sequence.new)


def _groups(ordered: list[_Sequence]) -> list[list[_Sequence]]:
    """Split where padding would double the work; a pass itself costs as much as some ten tokens."""
    groups: list[list[_Sequence]] = []
    for sequence in ordered:
        if not groups or sequence.new > 2 * groups[-1][0].new + 16:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def _prefill_group(model: CausalLM, batch: Batch, group: list[_Sequence]) -> None:
    """Sequences run in the slots behind the batch; further members of a sequence copy its slot."""
    first, longest = len(batch), max(s.new for s in group)
    rows = sum(len(s.members) for s in group)
    batch.reserve(first + rows, max(s.known for s in group) + longest)
    for row, sequence in enumerate(group):
        if sequence.prefix is not None:
            batch.cache.write(first + row, sequence.prefix)
    hidden = _run(model, batch, group, longest)
    logits = model.logits(hidden[torch.arange(len(group)), torch.tensor([s.new - 1 for s in group])])
    members = [(i, s, s.members[0]) for i, s in enumerate(group)]
    members += [(i, s, member) for i, s in enumerate(group) for member in s.members[1:]]
    for source, sequence, generation in members:
        if len(batch) != first + source:
            batch.cache.move(first + source, len(batch), len(sequence.tokens))
        if generation.logprob_start >= 0 and generation.prompt_logprobs is None:
            generation.prompt_logprobs = _prompt_logprobs(model, hidden[source], generation)
        generation.cached_tokens = min(sequence.known, len(generation.prompt))
        batch.add(generation, len(sequence.tokens))
    sources = [source for source, _, _ in members]
    batch.sample(logits if len(members) == len(group) else logits[torch.tensor(sources)], first)


def _run(model: CausalLM, batch: Batch, group: list[_Sequence], longest: int) -> Tensor:
    padded = torch.tensor([s.tokens[s.known :] + [0] * (longest - s.new) for s in group])
    known = torch.tensor([s.known for s in group])
    width = int(known.max())
    parts = []
    for start in range(0, longest, CHUNK):
        chunk = padded[:, start : start + CHUNK]
        parts.append(
            model.forward(chunk, known + start, width + start + chunk.shape[1], batch.cache, len(batch))
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _prompt_logprobs(model: CausalLM, hidden_te: Tensor, generation: Generation) -> list[float]:
    """log p of prompt tokens after `logprob_start`, at temperature 1 as in SGLang."""
    start, prompt = generation.logprob_start, generation.prompt
    found: list[float] = []
    for low in range(start, len(prompt) - 1, CHUNK):
        high = min(low + CHUNK, len(prompt) - 1)
        logprobs = torch.log_softmax(model.logits(hidden_te[low:high]), -1)
        targets = torch.tensor(prompt[low + 1 : high + 1])
        found += logprobs.gather(1, targets[:, None]).squeeze(1).tolist()
    return found
