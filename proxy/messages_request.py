"""An Anthropic Messages request as the one normalised conversation. Pure.

System text and system-role messages become one leading system message; text blocks are joined by newlines; tool results
become tool messages; thinking becomes reasoning. What would change the sampling and cannot be honoured is refused by name.
"""

from __future__ import annotations

from typing import Any

from proxy.api_fields import MESSAGES, MESSAGES_BLOCKS
from proxy.chat_request import ChatRequest, parse_options
from proxy.conversation import renamed
from proxy.fields import Record
from schemas.errors import BadRequest

_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_BILLING = "x-anthropic-billing-header:"
"""Claude Code puts a line of book-keeping, other at every request, before its system prompt: no model should read it."""


def parse_messages(body: dict[str, Any], temperature: float, fields: Record = MESSAGES) -> ChatRequest:
    """BadRequest names the field."""
    fields.check(body)
    ignored = MESSAGES.unknown(body)
    options = MESSAGES.named(body)
    options["stop"] = body.get("stop_sequences")
    _output(body, options, ignored)
    _thinking(body, options, ignored)
    tools = [_tool(tool, index) for index, tool in enumerate(body.get("tools") or ())]
    _choice(options)
    with renamed(_NAMES):
        request = parse_options({**options, "tools": tools}, temperature)
    request.messages = _conversation(body, ignored)
    request.ignored = ignored
    return request


def _output(body: dict[str, Any], options: dict[str, Any], ignored: list[str]) -> None:
    config = body.get("output_config") or {}
    wanted = config.get("format")
    if wanted is not None:
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}
    if config.keys() - {"format"}:
        ignored.append("output_config")


def _thinking(body: dict[str, Any], options: dict[str, Any], ignored: list[str]) -> None:
    """Off is honoured by templates that can switch it off; a budget of thoughts is advice."""
    thinking = body.get("thinking") or {}
    if thinking.get("type") == "disabled":
        given = options.get("chat_template_kwargs") or {}
        options["chat_template_kwargs"] = {"enable_thinking": False, **given}
    elif thinking:
        ignored.append("thinking")


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"tools[{index}] is a tool of another server", field=f"tools[{index}].type")
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _choice(options: dict[str, Any]) -> None:
    choice = options.pop("tool_choice", None)
    if choice is None:
        return
    kind = choice["type"]
    named = {"type": "function", "function": {"name": choice.get("name")}}
    options["tool_choice"] = {"any": "required", "tool": named}.get(kind, kind)
    if choice.get("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False


def _conversation(body: dict[str, Any], ignored: list[str]) -> list[dict[str, Any]]:
    given = body["messages"]
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list that is not empty", field="messages")
    system = _system(body.get("system"), "system", ignored)
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(message, dict) or role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where} must be an object with a known role", field=f"{where}.role")
        if role == "system":
            system += _system(message.get("content"), f"{where}.content", ignored)
        elif role == "user":
            messages += _user(_blocks(message, where), where)
        else:
            messages.append(_assistant(_blocks(message, where), where))
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRequest(
            "the last message must be the user's: a begun answer cannot be continued", field="messages"
        )
    return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def _system(content: object, where: str, ignored: list[str]) -> list[str]:
    if content is None:
        return []
    texts = [content] if isinstance(content, str) else [_text(b, where) for b in _as_list(content, where)]
    kept = [text for text in texts if text and not text.startswith(_BILLING)]
    if len(kept) < len([text for text in texts if text]):
        ignored.append("system.billing_header")
    return kept


def _blocks(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = _as_list(content, f"{where}.content")
    for place, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or not isinstance(kind, str | None):
            raise BadRequest(f"{where}.content must have blocks", field=f"{where}.content")
        if kind in MESSAGES_BLOCKS:
            MESSAGES_BLOCKS[kind].check(block, f"{where}.content[{place}]")
    return blocks


def _as_list(content: object, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of blocks", field=where)
    return content


def _text(block: object, where: str) -> str:
    if isinstance(block, dict) and block.get("type", "text") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    raise BadRequest(f"{where} may have text only", field=where)


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Results in their order, each a tool message; text between them a user message."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text(block, f"{where}.content"))
            continue
        flush()
        content = block.get("content")
        if isinstance(content, list):
            content = "\n".join(_text(part, f"{where}.content") for part in content)
        elif content is not None and not isinstance(content, str):
            raise BadRequest(f"{where}.content has a result that is no text", field=f"{where}.content")
        call = block.get("tool_use_id") or ""
        messages.append({"role": "tool", "tool_call_id": call, "content": content or ""})
    flush()
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(block.get("thinking") or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                function = {"name": block["name"], "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id") or "", "type": "function", "function": function})
            case _:
                texts.append(_text(block, f"{where}.content"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thought.strip() for thought in thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
