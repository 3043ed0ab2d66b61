"""A tool choice that forces a call: a grammar for the engine, in every API's words, and a call that is parsed like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_calls import HELLO
from chat_rig import CALLS, always_says, api_settings, write_tokenizer
from proxy_rig import running_proxy
from scripted_engine import ScriptedEngine

from proxy.forced_calls import call_grammar, forced_functions
from proxy.tool_calls import parse_tool_calls
from schemas.errors import BadRequest

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK: dict[str, Any] = {"name": "look", "parameters": SCHEMA}
WAIT: dict[str, Any] = {"name": "wait"}
TOOLS = [{"type": "function", "function": function} for function in (LOOK, WAIT)]
LOOK_TAG = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "look", "arguments": ',
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "}\n</tool_call>",
}
WAIT_TAG = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "wait", "arguments": ',
    "content": {"type": "json_schema", "json_schema": {"type": "object"}},
    "end": "}\n</tool_call>",
}
THOUGHT = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "const_string", "value": "\n\n"},
    ],
}


def calls(*tags: Any, several: bool = True) -> dict[str, Any]:
    return {
        "type": "tags_with_separator", "tags": list(tags), "separator": "\n", "at_least_one": True,
        "stop_after_first": not several,
    }  # fmt: skip


def grammar(functions: list[Any], **how: bool) -> Any:
    tag = json.loads(call_grammar(functions, **{"several": True, "thinks": False, "inside": False, **how}))
    assert tag["type"] == "structural_tag"
    return tag["format"]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_which_functions_are_forced() -> None:
    assert [forced_functions(choice, TOOLS) for choice in (None, "auto", "none")] == [[], [], []]
    assert forced_functions("required", TOOLS) == [LOOK, WAIT]
    assert forced_functions(named("wait"), TOOLS) == [WAIT]


@pytest.mark.parametrize(
    ("choice", "tools"),
    [("required", []), (named("jump"), TOOLS), ({"type": "allowed_tools"}, TOOLS), ({"type": "function"}, TOOLS)],
)  # fmt: skip
def test_what_cannot_be_forced_is_refused_by_name(choice: Any, tools: list[Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        forced_functions(choice, tools)
    assert refused.value.detail["field"] == "tool_choice"


def test_the_grammar_is_that_of_the_calls_and_of_a_thought_before_them() -> None:
    assert grammar([LOOK, WAIT]) == calls(LOOK_TAG, WAIT_TAG)
    assert grammar([LOOK], several=False) == calls(LOOK_TAG, several=False)
    inside = {"type": "sequence", "elements": [THOUGHT, calls(LOOK_TAG)]}
    assert grammar([LOOK], thinks=True, inside=True) == inside
    begun = {"type": "const_string", "value": "<think>\n"}
    thought_or_not = [{"type": "sequence", "elements": [begun, THOUGHT, calls(LOOK_TAG)]}, calls(LOOK_TAG)]
    assert grammar([LOOK], thinks=True) == {"type": "or", "elements": thought_or_not}


@pytest.mark.parametrize("name", ["look", 'a "quoted" one', "grüße", "back\\slash"])
def test_what_the_grammar_lets_through_is_parsed_as_a_call(name: str) -> None:
    tag = grammar([{"name": name}])["tags"][0]
    content, parsed = parse_tool_calls(f'{tag["begin"]}{{"at": "x"}}{tag["end"]}', "salt")
    assert (content, [call["function"] for call in parsed]) == (
        "",
        [{"name": name, "arguments": '{"at":"x"}'}],
    )


ANTHROPIC = [{"name": "look", "input_schema": SCHEMA}, {"name": "wait"}]
RESPONSES = [{"type": "function", **LOOK}, {"type": "custom", "name": "say"}]
ASKED = {"messages": HELLO, "max_tokens": 200, "tools": ANTHROPIC}
FORCED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}, ["look", "wait"]),
    ("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": named("look")}, ["look"]),
    ("/v1/responses", {"input": "hello", "tools": RESPONSES, "tool_choice": "required"}, ["look", "say"]),
    ("/v1/responses", {"input": "hello", "tools": RESPONSES, "tool_choice": {"type": "custom", "name": "say"}}, ["say"]),
    ("/v1/messages", {**ASKED, "tool_choice": {"type": "any"}}, ["look", "wait"]),
    ("/v1/messages", {**ASKED, "tool_choice": {"type": "tool", "name": "look"}}, ["look"]),
]  # fmt: skip


@pytest.mark.broker
async def test_every_api_hands_it_on_and_names_it_where_the_engine_has_no_grammars(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.tokens = always_says(CALLS)
    settings = api_settings(broker, tmp_path, engine, write_tokenizer(tmp_path / "tokenizer"))
    async with running_proxy(settings) as proxy:
        for path, body, functions in FORCED:
            status, reply = await proxy.post(path, body)
            assert status == 200, reply
            assert "look" in str(reply)
            sent = json.loads(engine.bodies[-1]["sampling_params"]["structural_tag"])["format"]
            sent = sent if "tags" in sent else sent["elements"][-1]
            begins = [tag["begin"].split('"')[3] for tag in sent["tags"]]
            assert begins == functions, path
        engine.refuses = "structural_tag"
        for path, body, _ in FORCED:
            status, reply = await proxy.post(path, body)
            assert (status, reply["error"]["param"]) == (400, "tool_choice"), reply
        status, reply = await proxy.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS})
        assert status == 200
        assert "structural_tag" not in engine.bodies[-1]["sampling_params"]
        both = {**FORCED[0][1], "response_format": {"type": "json_object"}}
        status, reply = await proxy.post("/v1/chat/completions", both)
        assert (status, reply["error"]["param"]) == (400, "tool_choice")
