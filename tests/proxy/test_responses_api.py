"""OpenAI's Responses with the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from chat_rig import CALLS, THOUGHT, TOKENIZER, api_settings, says, segments, text_of, write_tokenizer
from proxy_rig import running_proxy
from scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker

LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def client_of(opened: dict[str, Any]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened["base_url"] + "/v1", api_key="none", max_retries=0)


def results(response: Any) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": c.call_id, "output": "saw"} for c in calls]


async def test_reasoning_and_parallel_calls_whole_and_streamed_append_to_one_lineage(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says(THOUGHT + "I look." + CALLS, THOUGHT + "again" + CALLS, "done")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        asked: Any = {"model": "policy", "instructions": "Be.", "tools": [LOOK]}
        history: list[Any] = [
            {"role": "developer", "content": "Short."},
            {"role": "user", "content": "hello"},
        ]
        first = await client.responses.create(input=history, **asked)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in first.output] == kinds
        assert first.output_text == "I look."
        assert first.status == "completed"
        history += [*(item.to_dict() for item in first.output), *results(first)]
        include: Any = ["reasoning.encrypted_content"]
        stream = await client.responses.create(input=history, stream=True, include=include, **asked)
        events: list[Any] = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [e.item.type for e in events if e.type == "response.output_item.done"] == kinds
        assert events[0].type == "response.created"
        second = events[-1].response
        told = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert (events[-1].type, second.output_text, told) == ("response.completed", "again", "again")
        thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
        assert thought == "let me see"
        opaque = [item.to_dict() for item in second.output]
        del opaque[0]["content"]  # some clients keep the opaque copy alone
        third = await client.responses.create(input=[*history, *opaque, *results(second)], **asked)
        assert third.output_text == "done"
    recorded = await segments(settings)
    assert len({s.lineage_id for s in recorded}) == 1
    assert [s.tito_mismatch_tokens for s in recorded] == [0, 0, 0]
    assert "Be.\n\nShort." in text_of(recorded[0].context_ids)
    assert third.usage is not None
    assert third.usage.input_tokens == recorded[2].prompt_tokens
    assert third.usage.output_tokens == len(recorded[2].output_ids) // 4


async def test_the_first_piece_of_a_stream_comes_with_the_first_token(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("spoken words")
    engine.held_at = 3
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        told = ""
        async for event in await client.responses.create(model="policy", input="hello", stream=True):
            if event.type == "response.output_text.delta":
                told += event.delta
                if told == "spo":
                    engine.go.set()  # this piece was here before the engine went on
    assert told == "spoken words"


async def test_free_text_tools_and_those_of_namespaces_are_functions_and_hosted_ones_are_counted(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    free = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    inner = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    engine.tokens = says(free + inner, "done")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    tools: Any = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "eyes", "tools": [LOOK]},
        {"type": "web_search"},
    ]
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        url = opened["base_url"] + "/v1/responses"
        _, first = await proxy.post(url, {"input": "hello", "tools": tools})
        patch, look = first["output"]
        assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** Begin")
        assert (look["type"], look["namespace"]) == ("function_call", "eyes")
        given = {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "ok"}
        seen = {"type": "function_call_output", "call_id": look["call_id"], "output": "x"}
        history = [{"role": "user", "content": "hello"}, patch, look, given, seen]
        status, second = await proxy.post(url, {"input": history, "tools": tools})
        assert (status, second["hoofprint"]["segment_index"]) == (200, 1)
        assert proxy.parts.metrics.counts["ignored_fields"] == 2
    one, two = await segments(settings)
    assert one.lineage_id == two.lineage_id
    assert "web_search" not in text_of(one.context_ids)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "item_reference"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"instructions": 5}, "instructions"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"top_p": 2}, "top_p"),
]


async def test_what_cannot_be_honoured_is_refused_by_name(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.refuses = "json_schema"
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        for body, field in REFUSED:
            status, reply = await proxy.post(opened["base_url"] + "/v1/responses", {"input": "hello", **body})
            assert (status, reply["error"]["param"]) == (400, field), body
        assert engine.bodies == []
        wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
        with pytest.raises(openai.BadRequestError) as refused:
            await client_of(opened).responses.create(model="policy", input="hello", text=wanted)
        assert (refused.value.code, refused.value.param) == ("engine_rejected", "text.format")
    assert engine.bodies[0]["sampling_params"]["json_schema"] == '{"type":"object"}'


async def test_a_budget_that_is_used_up_is_incomplete_and_logprobs_come_when_asked_for(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = lambda _: list(TOKENIZER.encode("words"))
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        include: Any = ["message.output_text.logprobs"]
        cut: Any = await client.responses.create(
            model="policy", input="hello", max_output_tokens=3, include=include
        )
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [entry.token for entry in cut.output[0].content[0].logprobs] == ["w", "o", "r"]


async def test_a_stream_that_breaks_ends_as_failed_and_without_a_record(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("spoken words")
    engine.held_at = 3
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        with pytest.raises(openai.APIError) as broken:
            await _read_until_broken(client, engine)
        assert broken.value.code == "engine_unavailable"
    assert await segments(settings) == []


async def _read_until_broken(client: openai.AsyncOpenAI, engine: ScriptedEngine) -> None:
    async for event in await client.responses.create(model="policy", input="hello", stream=True):
        if event.type == "response.output_text.delta":
            await engine.stop()
