"""Fields of an odd shape that no document allows, found by fuzzing and by reading: refused by name, never a mistake of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_calls import APIS, HELLO
from chat_rig import always_says, api_settings, write_tokenizer
from proxy_rig import running_proxy
from scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (api for api in APIS if api.name != "generate")
NATIVE = APIS[0]
DEEP: Any = {}
for _ in range(400):
    DEEP = {"a": DEEP}
ODD: list[tuple[Any, dict[str, Any]]] = [
    *((api, {"stop_token_ids": value}) for api in (CHAT, RESPONSES, MESSAGES) for value in ("x", 7, [[]], ["a"], [{}])),
    *((api, {"ignore_eos": "yes"}) for api in (CHAT, COMPLETIONS, MESSAGES)),
    (MESSAGES, {"thinking": {"type": "disabled"}, "chat_template_kwargs": 7}),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}),
    (CHAT, {"tools": [{}]}),
    (CHAT, {"tools": [{"type": "function", "function": 7}]}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": 7}}]}),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": {"a": 1}}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}, *HELLO]}),
    (MESSAGES, {"messages": [{"role": ["user"], "content": "x"}]}),
    (MESSAGES, {"messages": [{"role": {}, "content": "x"}]}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": 7}]}),
    (RESPONSES, {"input": [{"type": ["message"]}]}),
    (RESPONSES, {"input": [{"role": {"a": 1}, "content": "x"}]}),
    (RESPONSES, {"include": [{}]}),
    (RESPONSES, {"tools": [{"type": ["function"], "name": "f"}]}),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": {}}]}),
    (RESPONSES, {"text": {"format": 7}}),
    (COMPLETIONS, {"prompt": [[1], [2]]}),
    (COMPLETIONS, {"prompt": [1.5]}),
    (COMPLETIONS, {"prompt": [10**9]}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "c", "function": {"name": "f", "arguments": json.dumps(DEEP)}}]}, *HELLO]}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": DEEP}]}),
    (NATIVE, {"input_ids": [True]}),
    (NATIVE, {"sampling_params": {"temperature": "hot"}}),
    (NATIVE, {"sampling_params": {"n": []}}),
    (NATIVE, {"final": True, "end": "now"}),
    (NATIVE, {"final": True, "end": {"status": []}}),
    (NATIVE, {"final": True, "end": {"components": [1]}}),
    *((api, {"session_id": value}) for api in APIS for value in (7, {}, ["s"], "s" * 300, "a\nb")),
    *((api, {"session_id": "s", "instance_id": value}) for api in APIS for value in (7, {}, "i" * 300)),
    *((api, {"stream": "yes"}) for api in APIS),
    *((api, {"model": {"a": 1}}) for api in (CHAT, RESPONSES)),
]  # fmt: skip


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (CHAT, {"logprobs": "a"}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"parallel_tool_calls": "x"}, "parallel_tool_calls"),
    (CHAT, {"tools": [{}]}, "tools[0].function"),
    (CHAT, {"tools": "x"}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
    (CHAT, {"tool_choice": 5}, "tool_choice"),
    (CHAT, {"stream_options": 5}, "stream_options"),
    (CHAT, {"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities[1]"),
    (CHAT, {"model": 5}, "model"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"seed": 1.5}, "seed"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**12]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"echo": True}, "echo"),
    (RESPONSES, {"text": 5}, "text"),
    (RESPONSES, {"text": {"format": {"type": 5}}}, "text.format.type"),
    (RESPONSES, {"reasoning": 5}, "reasoning"),
    (RESPONSES, {"include": "x"}, "include"),
    (RESPONSES, {"max_output_tokens": "x"}, "max_output_tokens"),
    (RESPONSES, {"instructions": 5}, "instructions"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    (RESPONSES, {"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "call_id": 5}]}, "input[0].call_id"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content.text"),
    (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
    (MESSAGES, {"stop_sequences": "x"}, "stop_sequences"),
    (MESSAGES, {"thinking": 5}, "thinking"),
    (MESSAGES, {"thinking": {"type": 5}}, "thinking.type"),
    (MESSAGES, {"output_config": 5}, "output_config"),
    (MESSAGES, {"tool_choice": "auto"}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}}, "tool_choice.disable_parallel_tool_use"),
    (MESSAGES, {"tools": [{"name": 5}]}, "tools[0].name"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
     "messages[0].content[0].tool_use_id"),
    (NATIVE, {"return_logprob": "x"}, "return_logprob"),
    (NATIVE, {"rid": 5}, "rid"),
    (NATIVE, {"top_logprobs_num": 65}, "top_logprobs_num"),
    (NATIVE, {"end": {"reward": 1}}, "end"),
    (NATIVE, {"final": "yes"}, "final"),
    (NATIVE, {"final": True, "end": {"reward": "x"}}, "end.reward"),
    (NATIVE, {"final": True, "end": {"reason": 5}}, "end.reason"),
    (NATIVE, {"final": True, "end": {"reward_pending": 1}}, "end.reward_pending"),
    (NATIVE, {"turn_id": 5}, "turn_id"),
    *((NATIVE, {"sampling_params": {name: value}}, f"sampling_params.{name}") for name, value in {
        "top_k": "x", "top_p": 0, "repetition_penalty": 0, "frequency_penalty": "x", "stop": 5, "stop_token_ids": 5,
        "logit_bias": {"1": "x"}, "min_new_tokens": -1, "max_new_tokens": 0, "json_schema": {}, "no_stop_trim": 1,
        "sampling_seed": "x", "n": 2, "foo": 1}.items()),
    *((api, {name: value}, name) for api in (CHAT, COMPLETIONS, RESPONSES, MESSAGES) for name, value in {
        "repetition_penalty": 0, "top_p": 0, "top_k": 0, "temperature": True, "n": 2, "logit_bias": {"1": 1.0}}.items()),
]  # fmt: skip
ADMIN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/policy/versions", {"version": 5, "checkpoint_uri": "/c"}, "version"),
    ("/v1/policy/versions", {"version": "none", "checkpoint_uri": "/c"}, "version"),
    ("/v1/policy/versions", {"version": "v2", "checkpoint_uri": 5}, "checkpoint_uri"),
    ("/v1/policy/versions", {"version": "v2", "checkpoint_uri": "/c", "step": 1.5}, "step"),
    ("/v1/policy/versions", {"version": "v2", "checkpoint_uri": "/c", "force": "x"}, "force"),
    ("/v1/rollout/pause", {"mode": "stop"}, "mode"),
    ("/v1/rollout/pause", {"timeout_seconds": "x"}, "timeout_seconds"),
    ("/v1/rollout/pause", {"session_id": 5}, "session_id"),
    ("/v1/rollout/resume", {"version": 5}, "version"),
    ("/v1/rollout/resume", {"session_id": "s", "version": "v2"}, "version"),
    ("/sessions", {"kind": "x"}, "kind"),
    ("/sessions", {"group_id": 5}, "group_id"),
    ("/sessions", {"group_id": "g"}, "sample_index"),
    ("/sessions", {"kind": "train", "sample_index": 0}, "group_id"),
    ("/sessions", {"kind": "free", "group_id": "g"}, "group_id"),
    ("/sessions", {"group_id": "g", "sample_index": 0, "session_id": "s"}, "session_id"),
    ("/sessions", {"group_id": "g", "sample_index": 0, "restart": "x"}, "restart"),
    ("/session/finalize", {"session_id": "s", "reward": True}, "reward"),
    ("/session/finalize", {"session_id": "s", "status": "x"}, "status"),
    ("/session/finalize", {"session_id": "s", "components": {"a": "x"}}, "components"),
    ("/session/discard", {"session_id": 5}, "session_id"),
    ("/session/reward", {"session_id": "s"}, "reward"),
    ("/session/reward", {"session_id": "s", "reward": 1, "source": 5}, "source"),
]


async def test_a_wrong_type_is_refused_by_the_name_of_its_field(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.tokens = always_says("well")
    checkpoint = write_tokenizer(tmp_path / "tokenizer")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    wrong = []
    async with running_proxy(settings) as proxy:
        calls = [(api.path, {**api.body, **odd}, odd, name) for api, odd, name in REFUSED]
        calls += [(path, body, body, name) for path, body, name in ADMIN]
        for path, body, odd, name in calls:
            status, reply = await proxy.post(path, body)
            if status != 400 or shown(reply) != name:
                wrong.append((path, odd, status, reply.get("error")))
        assert wrong == []
        assert len(engine.bodies) == 1  # of the field that only the engine knows


def shown(reply: dict[str, Any]) -> str:
    return str(reply["error"].get("param"))


async def test_odd_fields(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.tokens = always_says("well")
    checkpoint = write_tokenizer(tmp_path / "tokenizer")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    wrong = []
    async with running_proxy(settings) as proxy:
        for api, odd in ODD:
            status, reply = await proxy.post(api.path, {**api.body, **odd})
            if status >= 500 or (status >= 400 and not reply["error"]["param"]):
                wrong.append((api.name, odd, status, reply["error"]["message"]))
    assert wrong == []
