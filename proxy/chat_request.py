"""An OpenAI chat request, checked: what changes the sampling is honoured or refused by name, the rest is counted. Pure."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import orjson

from proxy.tool_calls import CLOSE
from schemas.errors import BadRequest

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_KNOWN = frozenset(
    {
        "messages", "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "max_tokens",
        "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "n", "logprobs", "top_logprobs",
        "response_format", "presence_penalty", "frequency_penalty", "repetition_penalty", "tools", "tool_choice",
        "parallel_tool_calls", "chat_template_kwargs", "final", "end", "session_id", "instance_id", "turn_id",
    }
)  # fmt: skip
_REFUSED = (
    "functions",
    "function_call",
    "audio",
    "web_search_options",
    "logit_bias",
    "best_of",
    "prompt_logprobs",
)
_NUMBERS = {
    "temperature": (0.0, 100.0, "temperature"),
    "top_p": (0.0, 1.0, "top_p"),
    "min_p": (0.0, 1.0, "min_p"),
    "presence_penalty": (-2.0, 2.0, "presence_penalty"),
    "frequency_penalty": (-2.0, 2.0, "frequency_penalty"),
    "repetition_penalty": (0.0, 2.0, "repetition_penalty"),
}
_WHOLES = {
    "top_k": (-1, 2**31, "top_k"),
    "min_tokens": (0, 2**31, "min_new_tokens"),
    "seed": (-(2**63), 2**63 - 1, "sampling_seed"),
}


class ChatRequest(msgspec.Struct):
    """`sampling` has the engine's names; `stops` are the stop strings; `ignored` the advisory fields."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    sampling: dict[str, Any]
    max_tokens: int | None
    stops: list[str]
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    template: dict[str, Any]
    model: str
    ignored: list[str]


def parse_chat(body: dict[str, Any], temperature: float) -> ChatRequest:
    """A chat completion. BadRequest names the field."""
    request = parse_options(body, temperature)
    request.messages = _messages(body.get("messages"))
    return request


def parse_options(body: dict[str, Any], temperature: float) -> ChatRequest:
    """Everything but the messages; every API comes through here. BadRequest names the field."""
    for field in _REFUSED:
        if body.get(field):
            raise BadRequest(f"{field} cannot be honoured", field=field)
    if body.get("n") not in (None, 1):
        raise BadRequest("n must be 1: send one request per sample", field="n")
    if body.get("modalities") not in (None, ["text"]):
        raise BadRequest("only text can be generated", field="modalities")
    tools = _tools(body)
    logprobs = bool(body.get("logprobs"))
    stops = _stops(body)
    if tools and body.get("parallel_tool_calls") is False:
        stops = [*stops, CLOSE]  # the end of the first call ends the turn
    sampling = _sampling(body, temperature, stops)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", field="stream_options")
    template = body.get("chat_template_kwargs") or {}
    if not isinstance(template, dict):
        raise BadRequest("chat_template_kwargs must be an object", field="chat_template_kwargs")
    if not isinstance(body.get("stream") or False, bool):
        raise BadRequest("stream must be true or false", field="stream")
    return ChatRequest(
        messages=[],
        tools=tools,
        sampling=sampling,
        max_tokens=_max_tokens(body),
        stops=stops,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        top_logprobs=(_whole(body, "top_logprobs", 0, 20) or 0) if logprobs else 0,
        template=template,
        model=str(body.get("model") or "policy"),
        ignored=sorted(body.keys() - _KNOWN - set(_REFUSED)),
    )


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty", field="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    """As templates want it: text content, arguments as objects, developer as system."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where} must be an object with a known role", field=f"{where}.role")
    content = message.get("content")
    if type(content) is str and len(message) == 2 and message["role"] != "developer":
        return message  # as most are
    if isinstance(content, list):
        content = "\n".join(_text_part(part, where) for part in content)
    if content is not None and not isinstance(content, str):
        raise BadRequest(f"{where}.content must be text", field=f"{where}.content")
    role = "system" if message["role"] == "developer" else message["role"]
    clean: dict[str, Any] = {**message, "role": role, "content": content or ""}
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls must be a list", field=f"{where}.tool_calls")
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
    return {key: value for key, value in clean.items() if value is not None}


def _text_part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRequest(f"{where}.content may have text parts only", field=f"{where}.content")


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise BadRequest(f"{where} must have function.name", field=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(
            orjson.JSONDecodeError
        ):  # a model's own broken arguments stay the text they were
            arguments = orjson.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}


def _tools(body: dict[str, Any]) -> list[Any]:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest("tools must be a list of objects", field="tools")
    if choice == "none":
        return []
    if choice not in (None, "auto"):
        raise BadRequest("tool_choice can be auto or none", field="tool_choice")
    return tools


def _stops(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest("stop must be a string or a list of at most 16 strings", field="stop")
    return stops


def _max_tokens(body: dict[str, Any]) -> int | None:
    newer = _whole(body, "max_completion_tokens", 1, 2**31)
    return newer if newer is not None else _whole(body, "max_tokens", 1, 2**31)


def _sampling(body: dict[str, Any], temperature: float, stops: list[str]) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": temperature}
    for field, (low, high, name) in _NUMBERS.items():
        value = body.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise BadRequest(f"{field} must be a number from {low} to {high}", field=field)
        sampling[name] = value
    for field, (least, most, name) in _WHOLES.items():
        whole = _whole(body, field, least, most)
        if whole is not None:
            sampling[name] = whole
    if stops:
        sampling["stop"] = stops
    _ends(body, sampling)
    _structure(body.get("response_format"), sampling)
    return sampling


def _ends(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Tokens that end an answer, and whether the model's own does."""
    ids, ignore = body.get("stop_token_ids"), body.get("ignore_eos")
    if ids is not None:
        if (
            not isinstance(ids, list)
            or len(ids) > 64
            or not all(type(i) is int and 0 <= i < 2**31 for i in ids)
        ):
            raise BadRequest("stop_token_ids must be a list of at most 64 token ids", field="stop_token_ids")
        sampling["stop_token_ids"] = ids
    if ignore is not None:
        if not isinstance(ignore, bool):
            raise BadRequest("ignore_eos must be true or false", field="ignore_eos")
        sampling["ignore_eos"] = ignore


def _structure(wanted: object, sampling: dict[str, Any]) -> None:
    """Structured output is the engine's work; an engine that has none refuses it."""
    if wanted is None or wanted == {"type": "text"}:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        sampling["json_schema"] = '{"type":"object"}'
    elif kind == "json_schema" and isinstance(wanted, dict) and isinstance(wanted.get("json_schema"), dict):
        sampling["json_schema"] = orjson.dumps(wanted["json_schema"].get("schema") or {}).decode()
    else:
        raise BadRequest("response_format must be text, json_object or json_schema", field="response_format")


def _whole(body: dict[str, Any], field: str, low: int, high: int) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{field} must be a whole number from {low} to {high}", field=field)
    return value
