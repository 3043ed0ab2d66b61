"""Structured output and forced calls on real SGLang, whose grammars no engine of ours has. Weights are random: the grammar
alone makes sense of what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import running_proxy, settings_for
from tiny_chat import write_chat_checkpoint
from update_calls import read

from schemas.events import TokenSegment
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS
from stack.engine.launch import EngineProcess

pytestmark = [pytest.mark.sglang, pytest.mark.broker, pytest.mark.timeout(400)]

SCHEMA = {
    "type": "object",
    "properties": {"at": {"enum": ["here", "there"]}},
    "required": ["at"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": SCHEMA}}
CHOICES: list[tuple[Any, set[str]]] = [
    ("required", {"look", "wait"}),
    ({"type": "function", "function": {"name": "wait"}}, {"wait"}),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def sglang(checkpoint: Path) -> Iterator[str]:
    process = EngineProcess(checkpoint, module="stack.sglang.launch", weight_version="v0")
    try:
        process.start(280.0)
        yield process.base_url
    finally:
        process.stop(20.0)


async def test_an_answer_follows_its_schema_and_a_forced_call_is_made(
    broker: str, tmp_path: Path, sglang: str, checkpoint: Path
) -> None:
    settings = settings_for(broker, tmp_path, [sglang], engine={"model": str(checkpoint)})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        url = opened["base_url"] + "/v1/chat/completions"
        form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
        body = {"messages": HELLO, "max_tokens": 1500, "response_format": form}
        _, said = await proxy.post(url, body)
        place = json.loads(said["choices"][0]["message"]["content"])
        for choice, names in CHOICES:
            forced = {"messages": HELLO, "max_tokens": 1500, "tools": [LOOK, WAIT], "tool_choice": choice}
            status, reply = await proxy.post(url, {**forced, "parallel_tool_calls": False})
            assert (status, reply["choices"][0]["finish_reason"]) == (200, "tool_calls"), reply
            (call,) = reply["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] in names
            assert json.loads(call["function"]["arguments"])["at"] in ("here", "there")
    assert place["at"] in ("here", "there")
    written = await read(settings, SEGMENTS, TokenSegment)
    assert [len(ids_of(segment.output_ids)) > 5 for segment in written] == [True] * 3
