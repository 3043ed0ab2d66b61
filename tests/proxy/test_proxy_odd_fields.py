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
