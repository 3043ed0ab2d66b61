"""An OpenAI chat request, checked: what changes the sampling is honoured or refused by name, the rest is counted. Pure."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import orjson

from proxy.api_fields import CHAT, CHAT_MESSAGE
from proxy.engine_refusals import CHAT_FIELDS
from proxy.forced_calls import forced_functions
from proxy.tool_calls import CLOSE
from schemas.errors import BadRequest

_HANDED_ON = [
    (ours, theirs)
    for ours, theirs in CHAT_FIELDS.items()
    if theirs not in ("max_tokens", "response_format", "tool_choice")  # these need more than another name
]
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatRequest(msgspec.Struct):
    """`sampling` has the engine's names; `stops` are the stop strings; `forced` the functions of which one must be called, one
    of them or, with `several`, more; `ignored` the advisory fields."""

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
    forced: list[dict[str, Any]]
    several: bool


def parse_chat(body: dict[str, Any], temperature: float) -> ChatRequest:
    """A chat completion. BadRequest names the field."""
    CHAT.check(body)
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    request = parse_options(body, temperature)
    request.messages = _messages(body["messages"])
    request.ignored = CHAT.unknown(body)
    return request


def parse_options(body: dict[str, Any], temperature: float) -> ChatRequest:
    """Everything but the messages and what is ignored; every API comes through here, with fields that its own table has
    checked. BadRequest names the field."""
    choice = body.get("tool_choice")
    tools = [] if choice == "none" else body.get("tools") or []
    forced = forced_functions(choice, tools)
    if forced and (body.get("response_format") or {}).get("type") not in (None, "text"):
        raise BadRequest("a forced call cannot follow a response_format as well", field="tool_choice")
    several = body.get("parallel_tool_calls") is not False
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if tools and not several:
        stops = [*stops, CLOSE]  # the end of the first call ends the turn
    most = body.get("max_completion_tokens")
    logprobs = bool(body.get("logprobs"))
    return ChatRequest(
        messages=[],
        tools=tools,
        sampling=_sampling(body, temperature, stops),
        max_tokens=most if most is not None else body.get("max_tokens"),
        stops=stops,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        logprobs=logprobs,
        top_logprobs=(body.get("top_logprobs") or 0) if logprobs else 0,
        template=body.get("chat_template_kwargs") or {},
        model=body.get("model") or "policy",
        ignored=[],
        forced=forced,
        several=several,
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
    CHAT_MESSAGE.check(message, where)
    if message.get("tool_calls") is not None:
        clean["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return {key: value for key, value in clean.items() if value is not None}


def _text_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return str(part[kind])
    raise BadRequest(f"{where}.content may have text parts only", field=f"{where}.content")


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(
            orjson.JSONDecodeError
        ):  # a model's own broken arguments stay the text they were
            arguments = orjson.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}


def _sampling(body: dict[str, Any], temperature: float, stops: list[str]) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": temperature}
    for name, field in _HANDED_ON:
        value = body.get(field)
        if value is not None:
            sampling[name] = value
    if stops:
        sampling["stop"] = stops
    _structure(body.get("response_format"), sampling)
    return sampling


def _structure(wanted: dict[str, Any] | None, sampling: dict[str, Any]) -> None:
    """Structured output is the engine's work; an engine that has none refuses it."""
    match wanted["type"] if wanted else "text":
        case "json_object":
            sampling["json_schema"] = '{"type":"object"}'
        case "json_schema":
            schema = (wanted or {}).get("json_schema")
            if schema is None:
                raise BadRequest(
                    "response_format.json_schema is required", field="response_format.json_schema"
                )
            sampling["json_schema"] = orjson.dumps(schema.get("schema") or {}).decode()
