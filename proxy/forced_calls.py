"""A tool choice that forces a call, as the grammar of the calls that may come. Pure.

SGLang takes a structural tag (xgrammar's, in the sampling parameter of that name): literal text around arguments that follow
the function's JSON Schema. The text is that of `tool_calls.py`, so what was forced is parsed like any other call, and
the tokens are the engine's own as ever. A model that reasons may do so before its call. Checked against SGLang 0.5.23 with
its xgrammar backend; an engine without grammars refuses the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.reply_sections import END_THINK, THINK
from proxy.tool_calls import CLOSE, OPEN
from schemas.errors import BadRequest

PARAMETER = "structural_tag"


def forced_functions(choice: Any, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The functions of which one must be called, by a `tool_choice` in the words of chat completions; empty: none must.
    BadRequest: no such function, or a choice that is not known."""
    if choice in (None, "auto", "none"):
        return []
    functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
    if choice != "required":
        named = choice.get("function") if choice.get("type") == "function" else None
        if not isinstance(named, dict):
            raise BadRequest("tool_choice can be none, auto, required or one function", field="tool_choice")
        functions = [function for function in functions if function["name"] == named.get("name")]
    if not functions:
        raise BadRequest("tool_choice forces a call of a function that is not in tools", field="tool_choice")
    return functions


def call_grammar(functions: Sequence[dict[str, Any]], *, several: bool, thinks: bool, inside: bool) -> str:
    """The structural tag: one call or, with `several`, one or more. `thinks`: the template knows reasoning; `inside`: the
    prompt has opened it, so that it must end before the call."""
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(function) for function in functions],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not several,
    }
    wanted: dict[str, Any] = calls
    if inside:
        wanted = _sequence(_thought(), calls)
    elif thinks:
        begun = {"type": "const_string", "value": f"{THINK}\n"}
        wanted = {"type": "or", "elements": [_sequence(begun, _thought(), calls), calls]}
    return orjson.dumps({"type": "structural_tag", "format": wanted}).decode()


def _tag(function: dict[str, Any]) -> dict[str, Any]:
    name = orjson.dumps(function["name"]).decode()
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{OPEN}\n{{"name": {name}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": f"}}\n{CLOSE}",
    }


def _thought() -> dict[str, Any]:
    text = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": END_THINK}
    return _sequence(text, {"type": "const_string", "value": "\n\n"})


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}
