"""An OpenAI Responses request as the one normalised conversation. Pure.

Instructions and the developer and system items before the first other item become one leading system message; reasoning
belongs to the assistant's items behind it; consecutive assistant items and calls are one assistant message. A `custom` tool
(free text in) is a function with one string argument for the model; hosted tools do not exist here: they are left out and
counted. The proxy keeps no conversations by id: the whole input comes with every request.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import Any

import msgspec
import orjson

from proxy.api_fields import RESPONSES, RESPONSES_ITEMS
from proxy.chat_request import ChatRequest, parse_options
from proxy.conversation import renamed
from proxy.fields import TEXT
from schemas.errors import BadRequest

NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
ARGUMENT = "input"


class ResponsesRequest(msgspec.Struct):
    """`custom`: names of free-text tools. `namespaces`: of tools that came in one. `encrypted`: send reasoning back opaque."""

    chat: ChatRequest
    custom: frozenset[str]
    namespaces: dict[str, str]
    encrypted: bool


def parse_responses(body: dict[str, Any], temperature: float) -> ResponsesRequest:
    """BadRequest names the field."""
    RESPONSES.check(body)
    ignored = RESPONSES.unknown(body)
    include, text = body.get("include") or (), body.get("text") or {}
    if text.get("verbosity") is not None:
        ignored.append("text.verbosity")
    options = RESPONSES.named(body)
    options["max_tokens"] = body.get("max_output_tokens")
    options["response_format"] = _format(text.get("format"))
    options["logprobs"] = LOGPROBS in include
    toolbox = _Toolbox(ignored)
    tools = toolbox.functions(body.get("tools") or [])
    options["tool_choice"] = _choice(body.get("tool_choice"))
    with renamed(NAMES):
        chat = parse_options({**options, "tools": tools}, temperature)
    chat.messages = _messages(body.get("instructions"), body["input"])
    chat.ignored = ignored
    return ResponsesRequest(chat, frozenset(toolbox.custom), toolbox.namespaces, ENCRYPTED in include)


def _choice(choice: Any) -> Any:
    """`tool_choice` in the words of chat completions: a custom tool is a function for the model."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in the words of chat completions."""
    if wanted is not None and wanted["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema") or {}}}
    return wanted


class _Toolbox:
    """Tools as functions, and what must be remembered of those that were none."""

    def __init__(self, ignored: list[str]) -> None:
        self.custom: set[str] = set()
        self.namespaces: dict[str, str] = {}
        self._ignored = ignored

    def functions(self, tools: list[dict[str, Any]], where: str = "tools") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for index, tool in enumerate(tools):
            found += self._of(tool, f"{where}[{index}]")
        return found

    def _of(self, tool: dict[str, Any], where: str) -> list[dict[str, Any]]:
        kind, name = tool["type"], tool.get("name")
        if kind == "namespace":
            RESPONSES.fields["tools"].check(tool.get("tools") or [], f"{where}.tools")
            inner = self.functions(tool.get("tools") or [], f"{where}.tools")
            self.namespaces.update({function["function"]["name"]: str(name) for function in inner})
            return inner
        if kind not in ("function", "custom"):
            self._ignored.append(f"tools.{kind}")
            return []
        if not name:
            raise BadRequest(f"{where}.name is required", field=f"{where}.name")
        parameters = tool.get("parameters") or {}
        if kind == "custom":
            self.custom.add(name)
            text = {ARGUMENT: {"type": "string"}}
            parameters = {"type": "object", "properties": text, "required": [ARGUMENT]}
        function = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
        return [{"type": "function", "function": function}]


class _Conversation:
    """Items in, messages out."""

    def __init__(self, system: list[str]) -> None:
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []
        self._answering = False

    def add(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        known = RESPONSES_ITEMS.get(kind) if isinstance(kind, str) else None
        if known is not None:
            known.check(item, where)
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning.append(reasoning_of(item))
                self._answering = False
            case "function_call":
                self._call(item, item.get("arguments"))
            case "custom_tool_call":
                self._call(item, {ARGUMENT: item.get("input") or ""})
            case "function_call_output" | "custom_tool_call_output":
                self._answering = False
                call, output = item.get("call_id") or "", item.get("output")
                text = output if isinstance(output, str) else _text(output, f"{where}.output")
                self.messages.append({"role": "tool", "tool_call_id": call, "content": text})
            case unknown:
                raise BadRequest(f"{where} is a {unknown}, which is not known here", field=f"{where}.type")

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, content = item.get("role"), item.get("content")
        text = content if isinstance(content, str) else _text(content, f"{where}.content")
        if role == "assistant":
            answer = self._answer()
            answer["content"] = "\n".join(filter(None, (answer["content"], text)))
            return
        self._answering = False
        if role in ("system", "developer"):
            if not self.messages:
                self.system.append(text)
            else:
                self.messages.append({"role": "system", "content": text})
        elif role == "user":
            self.messages.append({"role": "user", "content": text})
        else:
            raise BadRequest(f"{where} must have a known role", field=f"{where}.role")

    def _answer(self) -> dict[str, Any]:
        if not self._answering:
            self.messages.append({"role": "assistant", "content": ""})
            self._answering = True
        answer = self.messages[-1]
        thoughts = [thought for thought in self._reasoning if thought.strip()]
        if thoughts:
            answer["reasoning_content"] = "\n".join(thoughts)
        self._reasoning.clear()
        return answer

    def _call(self, item: dict[str, Any], arguments: object) -> None:
        if isinstance(arguments, str):
            with contextlib.suppress(orjson.JSONDecodeError):
                arguments = orjson.loads(arguments or "{}")
        function = {"name": item["name"], "arguments": arguments if arguments is not None else {}}
        call = {"id": item.get("call_id") or "", "type": "function", "function": function}
        self._answer().setdefault("tool_calls", []).append(call)


def _messages(instructions: str | None, given: object) -> list[dict[str, Any]]:
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be text or a list of items", field="input")
    conversation = _Conversation([instructions] if instructions else [])
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise BadRequest(f"input[{index}] must be an object", field=f"input[{index}]")
        conversation.add(item, f"input[{index}]")
    system = "\n\n".join(conversation.system)
    head = [{"role": "system", "content": system}] if system else []
    return [*head, *conversation.messages]


def _text(parts: object, where: str) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise BadRequest(f"{where} must be text or a list of parts", field=where)
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in ("input_text", "output_text", "text", "refusal"):
            raise BadRequest(f"{where} may have text parts only", field=where)
        said = part.get("refusal" if kind == "refusal" else "text")
        TEXT.check(said, f"{where}.text")
        texts.append(str(said))
    return "\n".join(texts)


def reasoning_of(item: dict[str, Any]) -> str:
    """Text of a reasoning item: its content, or the opaque copy that clients keep."""
    content = item.get("content")
    if isinstance(content, list) and content:
        return "\n".join(part.get("text") or "" for part in content)
    try:
        return base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""  # of another server


def opaque(reasoning: str) -> str:
    """What a client sends back unread."""
    return base64.b64encode(reasoning.encode()).decode()
