"""The bodies of SGLang's HTTP contract (0.5.23): what is accepted, what is refused, and with which words.

Three shapes of refusal, as SGLang has them: a body that does not fit gives `{"object": "error", "message": "sentence", …}`,
an unknown sampling field `{"error": "sentence"}`, and a request that fits but cannot be served `{"error": {"message":
"sentence"}}`. All are 400 and nothing has started then. Unknown top-level keys are ignored, unknown sampling parameters are
refused. Known parameters that this engine does not have (grammars, several samples, …) are
refused when set: silently ignoring them would change the result.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from schemas.errors import BadRequest
from stack.engine.generation import Generation
from stack.engine.sampling import NO_TOP_K, Sampling
from stack.engine.scheduler import PauseMode

Body = TypeVar("Body")


class ContractError(BadRequest):
    """The body does not fit the contract."""

    def payload(self) -> dict[str, object]:
        """The answer's body."""
        return {"object": "error", "message": self.message, "type": "Bad Request", "param": None, "code": 400}


class UnknownSamplingField(ContractError):
    """A sampling parameter that nobody knows."""

    def payload(self) -> dict[str, object]:
        """The answer's body."""
        return {"error": self.message}


class Refused(BadRequest):
    """The request fits the contract but cannot be served: answered as `{"error": {"message":
    "sentence"}}`."""


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params` on the wire; a null is the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    sampling_seed: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    n: int | None = None
    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    logit_bias: dict[str, float] | None = None
    custom_params: Any = None
    beam_width: Any = None
    watermark: Any = None
    choice: Any = None


_NOT_HERE = (
    "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "beam_width", "watermark", "choice",
)  # fmt: skip


class GenerateBody(msgspec.Struct):
    """`/generate` on the wire; one prompt per request."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingBody = msgspec.field(default_factory=SamplingBody)
    rid: str | None = None
    return_logprob: bool | None = False
    logprob_start_len: int | None = -1
    top_logprobs_num: int | None = 0
    stream: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_routed_experts: bool | None = False
    routed_experts_start_len: int | None = 0


class AbortBody(msgspec.Struct):
    """`/abort_request`."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    """`/pause_generation`."""

    mode: PauseMode = "abort"


class UpdateBody(msgspec.Struct):
    """`/update_weights_from_disk`."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct):
    """`/update_weight_version`: a label without new weights. Aborting everything is SGLang's default."""

    new_version: str
    abort_all_requests: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded checkpoint allows."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    has_tokenizer: bool
    has_experts: bool = False


def decode(raw: bytes, body: type[Body]) -> Body:
    """Parse a JSON body; the error names the field as SGLang's parser does."""
    try:
        return msgspec.json.decode(raw or b"{}", type=body)
    except msgspec.DecodeError as error:
        message = str(error)
        if "unknown field `" in message:
            name = message.split("`")[1]
            known = ", ".join(f"`{known}`" for known in SamplingBody.__struct_fields__)
            raise UnknownSamplingField(f"unknown field `{name}`, expected one of {known}") from error
        raise ContractError(message) from error


def resolve_sampling(body: SamplingBody, limits: Limits) -> Sampling:
    """Defaults and ranges; a value out of its range is refused by its name."""
    for name in _NOT_HERE:
        if getattr(body, name):
            raise Refused(f"{name} is not supported by the CPU engine.", field=name)
    if body.n not in (None, 1):
        raise Refused("n must be 1: send one request per sample.", field="n")
    if body.stop and not limits.has_tokenizer:
        raise Refused(
            f"stop={body.stop!r} is unavailable when skip_tokenizer_init=True (requires tokenizer to decode tokens to "
            "text for matching): there is none in the checkpoint directory; use stop_token_ids.",
            field="stop",
        )
    top_k = body.top_k if body.top_k is not None and body.top_k != -1 else NO_TOP_K
    sampling = Sampling(
        max_new_tokens=128 if body.max_new_tokens is None else body.max_new_tokens,
        min_new_tokens=body.min_new_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=top_k,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias or {}, limits),
        seed=body.sampling_seed,
        stop_token_ids=frozenset(t for t in body.stop_token_ids or () if 0 <= t < limits.vocab_size),
        stop=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        no_stop_trim=bool(body.no_stop_trim),
    )
    _check_ranges(sampling, limits)
    return sampling


def _bias(given: dict[str, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isdecimal() and token.isascii() and int(token) < limits.vocab_size):
            raise Refused(
                f"logit_bias must has keys in [0, {limits.vocab_size - 1}], got {token[:20]}.", field="logit_bias"
            )  # fmt: skip
    return tuple((int(token), value) for token, value in given.items())


def _check_ranges(s: Sampling, limits: Limits) -> None:
    allowed = {
        f"temperature must be a non-negative finite number, got {s.temperature:g}": 0.0
        <= s.temperature
        < math.inf,
        f"top_p must be in (0, 1], got {s.top_p:g}": 0.0 < s.top_p <= 1.0,
        "top_k must be -1 (disable), or at least 1": s.top_k >= 1,
        "min_p must be in [0, 1]": 0.0 <= s.min_p <= 1.0,
        "repetition_penalty must be in (0, 2]": 0.0 < s.repetition_penalty <= 2.0,
        "presence_penalty must be in [-2, 2]": -2.0 <= s.presence_penalty <= 2.0,
        "frequency_penalty must be in [-2, 2]": -2.0 <= s.frequency_penalty <= 2.0,
        "max_new_tokens must be at least 0": s.max_new_tokens >= 0,
        "min_new_tokens must be in [0, max_new_tokens]": 0 <= s.min_new_tokens <= s.max_new_tokens,
    }
    for sentence, holds in allowed.items():
        if not holds:
            raise Refused(f"{sentence}.", field=sentence.split()[0])


def check_prompt(prompt: list[int], max_new_tokens: int, limits: Limits) -> None:
    """Refuse what would crash or overflow: empty, out of the vocabulary, longer than the context."""
    if not prompt:
        raise Refused("input_ids cannot be empty.", field="input_ids")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        bad = next(t for t in prompt if not 0 <= t < limits.vocab_size)
        raise Refused(
            f"Token id {bad} in input_ids is out of the vocabulary (size {limits.vocab_size}).",
            field="input_ids",
        )
    if len(prompt) >= limits.context_length:
        raise Refused(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens).",
            field="input_ids",
        )
    total = len(prompt) + max_new_tokens
    if total > limits.context_length:
        raise Refused(
            f"Requested token count exceeds the model's maximum context length of {limits.context_length} tokens. "
            f"You requested a total of {total} tokens: {len(prompt)} tokens from the input messages and "
            f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input messages "
            f"or the completion to fit within the limit.",
            field="max_new_tokens",
        )


def to_generation(body: GenerateBody, prompt: list[int], limits: Limits, default_seed: int) -> Generation:
    """A checked request, ready for the scheduler."""
    sampling = resolve_sampling(body.sampling_params, limits)
    check_prompt(prompt, sampling.max_new_tokens, limits)
    experts_start = _experts_start(body, len(prompt), limits)
    wants_logprob = bool(body.return_logprob)
    start = -1 if body.logprob_start_len is None or not wants_logprob else body.logprob_start_len
    if start >= len(prompt):
        raise Refused(
            f"logprob_start_len ({start}) must be less than the number of input tokens ({len(prompt)}).",
            field="logprob_start_len",
        )
    seed = default_seed if sampling.seed is None else sampling.seed
    return Generation(
        rid=body.rid or uuid.uuid4().hex,
        prompt=prompt,
        sampling=sampling,
        seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
        end_ids=frozenset() if sampling.ignore_eos else sampling.stop_token_ids | limits.eos_token_ids,
        return_logprob=wants_logprob,
        logprob_start=start,
        top_logprobs=min(body.top_logprobs_num or 0, limits.vocab_size) if wants_logprob else 0,
        experts_start=experts_start,
        stream=bool(body.stream),
        stream_interval=max(1, body.sampling_params.stream_interval or 1),
    )


def _experts_start(body: GenerateBody, prompt_tokens: int, limits: Limits) -> int | None:
    if not body.return_routed_experts or not limits.has_experts:
        return None  # SGLang answers without rows, too, where there is nothing to route
    start = body.routed_experts_start_len or 0
    if not 0 <= start <= prompt_tokens:
        raise Refused(
            f"routed_experts_start_len ({start}) must be from 0 to the number of input tokens ({prompt_tokens}).",
            field="routed_experts_start_len",
        )
    return start
