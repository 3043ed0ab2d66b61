"""One request's life inside the engine, and how it is reported.

A `Generation` is created by an HTTP handler, filled by the scheduler thread, and read by the handler. The
lists only grow, so the handler may read their first n entries at any time; `finish_reason` is set last.
Version spans (SGLang's `meta_info.weight_versions`) are half-open ranges over output tokens; a change of
the version label before the first token does not split.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stack.engine.experts import encode_routes
from stack.engine.sampling import Sampling


def finish_stop(matched: int | str) -> dict[str, Any]:
    """Ended by a stop token or a stop string."""
    return {"type": "stop", "matched": matched}


def finish_length(length: int) -> dict[str, Any]:
    """Ended by `max_new_tokens`."""
    return {"type": "length", "length": length}


def finish_abort(message: str, status_code: int | None = None, err_type: str | None = None) -> dict[str, Any]:
    """Aborted by a user (no status code) or by a failure of the engine."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": err_type}


@dataclass(slots=True, eq=False)
class Generation:
    """The request and its growing result."""

    rid: str
    prompt: list[int]
    sampling: Sampling
    seed: int
    end_ids: frozenset[int]
    """Tokens that end the generation: stop tokens, and the model's own unless `ignore_eos`."""
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    experts_start: int | None = None
    """First position whose routed experts are wanted; None: they are not."""
    stream: bool = False
    stream_interval: int = 1
    """Tokens per event."""
    arrived: float = field(default_factory=time.perf_counter)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    routes: Tensor | None = None
    """Routed experts (positions, layers, top_k) when it last left the batch."""
    cached_tokens: int = 0
    retractions: int = 0
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(version, first output token) of each span."""
    finish_reason: dict[str, Any] | None = None
    weights_epoch: int = 0
    """The engine's count of weight changes at its last prefill: while equal, its keys are of one model."""
    listener: Callable[[], None] | None = None
    """Called in the event loop when there is news; the scheduler does not look at it."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and output: what a prefill must run."""
        return self.prompt + self.output_ids

    def enter_version(self, version: str) -> None:
        """Weights of `version` produce the next token."""
        produced = len(self.output_ids)
        if self.spans and self.spans[-1][0] == version:
            return
        if self.spans and self.spans[-1][1] == produced:
            self.spans.pop()
            if self.spans and self.spans[-1][0] == version:
                return
        self.spans.append((version, produced))

    def append(self, token: int, logprob: float) -> None:
        """Take a sampled token and decide whether it was the last one (stop tokens are checked first, as SGLang
        does).

        A scoring call (`max_new_tokens` 0) takes none.
        """
        if self.sampling.max_new_tokens == 0:
            self.finish_reason = finish_length(0)
            return
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        if logprob != logprob:
            self.finish_reason = finish_abort("The model's logits are not finite.", 500, "NonFiniteLogits")
        elif token in self.end_ids:
            self.finish_reason = finish_stop(token)
        elif len(self.output_ids) >= self.sampling.max_new_tokens:
            self.finish_reason = finish_length(len(self.output_ids))

    def tells(self) -> bool:
        """Whether an event of its stream is due: with the first token, and with every so many behind it."""
        every = self.stream_interval
        return self.stream and (every == 1 or len(self.output_ids) % every == 1)

    def version_spans(self) -> list[dict[str, Any]]:
        """Spans as the API reports them."""
        starts = [start for _, start in self.spans]
        ends = [*starts[1:], len(self.output_ids)] if starts else []
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.spans, ends, strict=True)
        ]

    def meta_info(self, end: int, first: int, version: str) -> dict[str, Any]:
        """`meta_info` for outputs [first, end); spans and latency are in the final report alone."""
        final = self.finish_reason is not None and end == len(self.output_ids)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason if final else None,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": end,
            "cached_tokens": self.cached_tokens,
            "cached_tokens_details": {"device": self.cached_tokens, "host": 0}
            if self.cached_tokens
            else None,
            "reasoning_tokens": 0,
            "num_retractions": self.retractions,
            "dp_rank": None,
            "weight_version": self.spans[-1][0] if self.spans else version,
        }
        if self.return_logprob:
            self._add_logprobs(meta, first, end)
        if final:
            meta["weight_versions"] = self.version_spans() or [{"version": version, "start": 0, "end": 0}]
            meta["e2e_latency"] = time.perf_counter() - self.arrived
            meta["response_sent_to_client_ts"] = time.time()
            if self.experts_start is not None and self.routes is not None:
                meta["routed_experts"] = encode_routes(self.routes, self.experts_start)
        return meta

    def _add_logprobs(self, meta: dict[str, Any], first: int, end: int) -> None:
        inputs: list[list[Any]] = []
        if self.prompt_logprobs is not None:
            known = [None, *self.prompt_logprobs]
            inputs = [
                [lp, token, None] for lp, token in zip(known, self.prompt[self.logprob_start :], strict=True)
            ]
        meta["input_token_logprobs"] = inputs
        meta["output_token_logprobs"] = [
            [lp, token, None]
            for lp, token in zip(self.logprobs[first:end], self.output_ids[first:end], strict=True)
        ]
        meta["output_token_logprobs_length"] = end
        if self.top_logprobs:
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [
                [[lp, token, None] for lp, token in top] for top in self.tops[first:end]
            ]
