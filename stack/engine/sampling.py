"""Draw one token per row from logits, with the log-probability that a trainer recomputes.

Seeded draws repeat exactly: the uniform number of a row is a hash of (seed, absolute position of the new
token) and the token is where it falls in the cumulative distribution. So a draw depends on seed, position
and logits only, whoever else is in the batch; and a request that was aborted and sent again with its
partial output continues the same random stream.

The log-probability is that of the temperature-scaled distribution (after penalties) before top-k, top-p and
min-p, as SGLang reports it; with temperature 0 the token is the argmax and the log-probability is at
temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TOP_K = 1 << 30
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters of one request."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = NO_TOP_K
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), behind the penalties."""
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_p < 1.0 or self.top_k < NO_TOP_K or self.min_p > 0.0)

    @property
    def adjusts(self) -> bool:
        """Whether its logits are changed before a token is drawn."""
        return self.penalizes or bool(self.logit_bias) or self.min_new_tokens > 0

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens (N), their log-probabilities (N), and the scaled log-probabilities (N, V) when asked for."""

    tokens: Tensor
    logprobs: Tensor
    distribution: Tensor | None


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser, vectorised (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in (0, 1) per row; never 0 or 1, so that a draw never leaves the support."""
    bits = mix64(mix64(seeds) ^ positions.astype(np.uint64))
    return ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


def draw(
    logits: Tensor,
    temperatures: Tensor,
    uniform: Tensor,
    *,
    greedy: Tensor | None = None,
    truncation: tuple[Tensor, Tensor, Tensor] | None = None,
    with_distribution: bool = False,
) -> Draw:
    """Sample rows of `logits` (N, V); `greedy` (N) and `truncation` (top_k, top_p, min_p) if any row needs it."""
    scaled = logits / temperatures[:, None]
    peak = scaled.amax(-1, keepdim=True)
    weights = torch.exp(scaled - peak)
    log_total = torch.log(weights.sum(-1, dtype=torch.float64))
    if truncation is not None:
        weights = truncate(weights, *truncation)
    cumulative = torch.cumsum(weights, -1, dtype=torch.float64)
    goal = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, goal, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy, scaled.argmax(-1), tokens)
    picked = scaled.gather(1, tokens[:, None]).squeeze(1).double()
    logprobs = picked - peak.squeeze(1).double() - log_total
    distribution = (scaled - peak).double() - log_total[:, None] if with_distribution else None
    return Draw(tokens, logprobs, distribution)


def truncate(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero the weights outside top-k, top-p and min-p; each limit is taken on the full distribution."""
    ordered, order = weights.sort(-1, descending=True)
    before = ordered.double().cumsum(-1) - ordered.double()
    drop = before > top_p[:, None] * ordered.sum(-1, keepdim=True, dtype=torch.float64)
    drop |= torch.arange(weights.shape[1]) >= top_k[:, None]
    drop |= ordered < min_p[:, None] * ordered[:, :1]
    return weights.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), 0.0)


def adjust(logits_v: Tensor, sampling: Sampling, output_ids: list[int], end_ids: frozenset[int]) -> None:
    """In place: penalties over the produced tokens, no end token before `min_new_tokens`, and the bias."""
    if sampling.penalizes and output_ids:
        counts = torch.bincount(torch.tensor(output_ids), minlength=len(logits_v))
        seen = counts > 0
        if sampling.repetition_penalty != 1.0:
            shrunk = torch.where(
                logits_v > 0, logits_v / sampling.repetition_penalty, logits_v * sampling.repetition_penalty
            )
            logits_v.copy_(torch.where(seen, shrunk, logits_v))
        logits_v.sub_(sampling.frequency_penalty * counts + sampling.presence_penalty * seen)
    if len(output_ids) < sampling.min_new_tokens and end_ids:
        logits_v[list(end_ids)] = -torch.inf
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        logits_v[list(tokens)] += torch.tensor(biases)
