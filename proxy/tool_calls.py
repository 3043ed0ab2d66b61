"""Tool calls in the text of Qwen- and Hermes-style models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import orjson

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def parse_tool_calls(text: str, salt: str) -> tuple[str, list[dict[str, Any]]]:
    """Content without its calls, and the calls in OpenAI's form. A block that is no call stays text, all of it then.

    `salt` makes the call ids unique within a run and the same for the same reply.
    """
    if OPEN not in text:
        return text, []
    calls: list[dict[str, Any]] = []
    for index, match in enumerate(_BLOCK.finditer(text)):
        call = _parse(match.group(1))
        if call is None:
            return text, []
        digest = hashlib.sha256(f"{salt}/{index}".encode()).hexdigest()[:24]
        calls.append({"id": f"call_{digest}", "type": "function", "function": call})
    return _BLOCK.sub("", text).strip(), calls


def _parse(block: str) -> dict[str, str] | None:
    try:
        call = orjson.loads(block)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    return {"name": call["name"], "arguments": arguments}
