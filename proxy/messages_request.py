"""An Anthropic Messages request as the one normalised conversation. Pure.

System text and system-role messages become one leading system message; text blocks are joined by newlines; tool results
become tool messages; thinking becomes reasoning. What would change the sampling and cannot be honoured is refused by name.
"""

from __future__ import annotations

from typing import Any

from proxy.chat_request import ChatRequest, parse_options
from proxy.conversation import renamed
from schemas.errors import BadRequest

_SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "chat_template_kwargs", "logit_bias", "n", "stop_token_ids", "ignore_eos",
)  # fmt: skip
_KNOWN = frozenset(
    {*_SAME, "messages", "system", "stop_sequences", "tools", "tool_choice", "final", "end", "session_id", "instance_id",
     "turn_id"}
)  # fmt: skip
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_BILLING = "x-anthropic-billing-header:"
"""Claude Code puts a line of book-keeping, other at every request, before its system prompt: no model should read it."""


def parse_messages(body: dict[str, Any], temperature: float) -> ChatRequest:
    """BadRequest names the field."""
    if body.get("mcp_servers"):
        raise BadRequest("mcp_servers cannot be honoured", field="mcp_servers")
    options: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    options["stop"] = body.get("stop_sequences")
    ignored = sorted(body.keys() - _KNOWN)
    _output(body, options, ignored)
    _thinking(body, options, ignored)
    tools = [_tool(tool, index) for index, tool in enumerate(_list(body, "tools"))]
    _choice(body.get("tool_choice"), options)
    with renamed(_NAMES):
        request = parse_options({**options, "tools": tools}, temperature)
    request.messages = _conversation(body, ignored)
    request.ignored = ignored
    return request


def _list(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list", field=name)
    return value


def _output(body: dict[str, Any], options: dict[str, Any], ignored: list[str]) -> None:
    config = body.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else None
    if wanted is None:
        return
    if not isinstance(wanted, dict) or not isinstance(wanted.get("schema"), dict):
        raise BadRequest("output_config.format must have a schema", field="output_config.format")
    options["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}
    if isinstance(config, dict) and config.keys() == {"format"}:
        ignored.remove("output_config")


def _thinking(body: dict[str, Any], options: dict[str, Any], ignored: list[str]) -> None:
    """Off is honoured by templates that can switch it off; a budget of thoughts is advice."""
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        given = options.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise BadRequest("chat_template_kwargs must be an object", field="chat_template_kwargs")
        options["chat_template_kwargs"] = {"enable_thinking": False, **given}
        ignored.remove("thinking")


def _tool(tool: object, index: int) -> dict[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise BadRequest(f"{where} must have a name", field=f"{where}.name")
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"{where} is a tool of another server", field=f"{where}.type")
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _choice(choice: object, options: dict[str, Any]) -> None:
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else choice
    options["tool_choice"] = {"any": "required", "tool": "required"}.get(str(kind), kind)
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False


def _conversation(body: dict[str, Any], ignored: list[str]) -> list[dict[str, Any]]:
    given = body.get("messages")
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
    for block in blocks:
        if not isinstance(block, dict):
            raise BadRequest(f"{where}.content must have blocks", field=f"{where}.content")
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
        call = str(block.get("tool_use_id") or "")
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
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue
            case "tool_use":
                function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
                calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
            case _:
                texts.append(_text(block, f"{where}.content"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thought.strip() for thought in thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
