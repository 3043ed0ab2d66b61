"""What an engine refuses is named by the client's own field, where the engine's message names its one. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

from schemas.errors import EngineRejected

CHAT_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "json_schema": "response_format",
    "structural_tag": "tool_choice",
}
"""Sampling parameters: the engine's name, and that of chat completions."""
_OWN = (
    *CHAT_FIELDS, "stop_regex", "regex", "ebnf", "logit_bias", "custom_params", "beam_width", "watermark",
    "choice", "stream_interval", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
)  # fmt: skip
NATIVE_FIELDS = {name: f"sampling_params.{name}" for name in _OWN}
_UNKNOWN = re.compile(r"unknown field `(\w+)`")
_WORD = re.compile(r"\w+")


@contextmanager
def naming_fields(names: Mapping[str, str], sent: Container[str]) -> Iterator[None]:
    """`names`: the client's by the engine's; `sent`: the engine's names of what the request has."""
    try:
        yield
    except EngineRejected as rejected:
        field = _field(rejected.message, names, sent)
        if field is not None:
            rejected.detail.setdefault("field", field)
        raise


def _field(message: str, names: Mapping[str, str], sent: Container[str]) -> str | None:
    unknown = _UNKNOWN.search(message)
    if unknown is not None:  # such a message goes on with the names of all the known ones
        return names.get(unknown.group(1)) or f"sampling_params.{unknown.group(1)}"
    words = [word for word in _WORD.findall(message) if word in names]
    return next((names[word] for word in words if word in sent), names[words[0]] if words else None)
