"""Anthropic Messages with the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from chat_rig import CALLS, THOUGHT, TOKENIZER, api_settings, says, segments, text_of, write_tokenizer
from proxy_rig import Proxy, running_proxy
from scripted_engine import ScriptedEngine
from structlog.testing import capture_logs

from proxy.messages_reply import render_anthropic
from schemas.errors import StalenessExceeded

pytestmark = pytest.mark.broker

TOOLS: Any = [{"name": "look", "description": "", "input_schema": {"type": "object"}}]
USER: Any = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def client_of(opened: dict[str, Any]) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=opened["base_url"], api_key="none", max_retries=0)


def create(client: anthropic.AsyncAnthropic, messages: Any, **more: Any) -> Any:
    return client.messages.create(model="policy", max_tokens=500, messages=messages, **more)


def results(message: Any) -> Any:
    """The assistant's message as history, and a result for each of its calls."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    answers = [
        {"type": "tool_result", "tool_use_id": b.id, "content": f"saw {b.input['at']}"}
        for b in message.content
        if b.type == "tool_use"
    ]
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": answers}]


async def test_thinking_and_parallel_calls_whole_and_streamed_append_to_one_lineage(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says(THOUGHT + "I look." + CALLS, "again" + CALLS, "done")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        system: Any = [
            {"type": "text", "text": "x-anthropic-billing-header: a=1;"},
            {"type": "text", "text": "Be."},
        ]
        first = await create(client, [USER], system=system, tools=TOOLS)
        assert [b.type for b in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("let me see", "I look.")
        assert [b.input for b in first.content[2:]] == [{"at": "x"}, {"at": "y"}]
        assert (first.stop_reason, first.hoofprint["segment_index"]) == ("tool_use", 0)
        history = [USER, *results(first)]
        system[0]["text"] = "x-anthropic-billing-header: a=2;"
        asked: Any = {"messages": history, "system": system, "tools": TOOLS}
        async with client.messages.stream(model="policy", max_tokens=500, **asked) as stream:
            kinds = [event.type async for event in stream]
            second = await stream.get_final_message()
        assert [b.type for b in second.content] == ["text", "tool_use", "tool_use"]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        third = await create(client, [*history, *results(second)], system=system, tools=TOOLS)
        assert (third.content[0].text, third.stop_reason) == ("done", "end_turn")
    recorded = await segments(settings)
    assert len({s.lineage_id for s in recorded}) == 1
    assert [s.tito_mismatch_tokens for s in recorded] == [0, 0, 0]
    assert "Be." in text_of(recorded[0].context_ids)
    assert "billing" not in text_of(recorded[0].context_ids)
    assert text_of(recorded[1].context_ids).count("<tool_response>") == 2
    assert second.usage.input_tokens == recorded[1].prompt_tokens
    assert second.usage.output_tokens == len(recorded[1].output_ids) // 4


async def test_a_stream_thinks_then_speaks_and_its_first_piece_comes_with_the_first_token(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says(THOUGHT + "spoken words")
    engine.held_at = len("<think>\nlet")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        stream = await create(client, [USER], stream=True)
        told: dict[str, str] = {"thinking_delta": "", "text_delta": "", "signature_delta": ""}
        async for event in stream:
            if event.type == "content_block_delta":
                value = event.delta.to_dict()
                told[event.delta.type] += next(str(v) for k, v in value.items() if k != "type")
                if told["thinking_delta"] == "let":
                    engine.go.set()  # this piece was here before the engine went on
    assert (told["thinking_delta"], told["text_delta"]) == ("let me see", "spoken words")
    assert told["signature_delta"]


async def test_a_conversation_may_change_its_api(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("one", "two")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        await create(client_of(opened), [USER])
        chat = openai.AsyncOpenAI(base_url=opened["base_url"] + "/v1", api_key="none")
        more: Any = [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and?"}]
        await chat.chat.completions.create(model="policy", messages=more)
    one, two = await segments(settings)
    assert (one.lineage_id, one.api, two.api) == (two.lineage_id, "messages", "chat")


async def test_tokens_are_counted_without_a_record(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        count = await client.messages.count_tokens(model="policy", messages=[USER], system="Be.")
    shown = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert count.input_tokens == len(TOKENIZER.encode(shown))
    assert await segments(settings) == []
    assert engine.bodies == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
    ({"tool_choice": {"type": "tool", "name": "nobody"}, "tools": TOOLS}, "tool_choice"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
]


async def test_what_cannot_be_honoured_is_refused_by_name_and_advice_is_named_once(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("fine", "fine", "fine")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        url = opened["base_url"] + "/v1/messages?beta=true"
        for body, field in REFUSED:
            status, reply = await proxy.post(url, {"messages": [USER], "max_tokens": 5, **body})
            assert (status, reply["type"], reply["error"]["type"]) == (
                400,
                "error",
                "invalid_request_error",
            ), body
            assert reply["error"]["param"] == field, body
        with capture_logs() as lines:
            for _ in range(2):
                advice = {"metadata": {"user_id": "u"}, "context_management": {}}
                status, _reply = await proxy.post(url, {"messages": [USER], "max_tokens": 5, **advice})
                assert status == 200
        named = [line["fields"] for line in lines if line["event"] == "advisory_fields_ignored"]
        assert named == [["context_management", "metadata"]]
        assert proxy.parts.metrics.counts["ignored_fields"] == 4
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            await create(client_of(opened), [USER], extra_body={"mcp_servers": [1]})


async def test_stop_sequence_budget_and_one_call_at_a_time(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    engine.tokens = lambda _: list(TOKENIZER.encode("keep STOP"))
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        cut = await client.messages.create(model="policy", max_tokens=3, messages=[USER])
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "kee")  # type: ignore[union-attr]
        engine.matched = "STOP"
        stopped = await create(client, [USER], stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        assert stopped.content[0].text == "keep "
        one: Any = {"type": "auto", "disable_parallel_tool_use": True}
        await create(client, [USER], tools=TOOLS, tool_choice=one)
    assert engine.bodies[-1]["sampling_params"]["stop"] == ["</tool_call>"]


async def test_a_stream_that_breaks_ends_with_an_error_and_without_a_record(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("spoken words")
    engine.held_at = 3
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        with pytest.raises(anthropic.APIStatusError, match="engine"):
            await _read_until_broken(proxy, engine)
    assert await segments(settings) == []


async def _read_until_broken(proxy: Proxy, engine: ScriptedEngine) -> None:
    stream = await create(client_of(await proxy.open()), [USER], stream=True)
    async for event in stream:
        if event.type == "content_block_delta":
            await engine.stop()


def test_a_refused_trajectory_must_not_be_tried_again() -> None:
    status, body, headers = render_anthropic(StalenessExceeded("too old", version_span=3))
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert body["error"]["code"] == "partial_rollout_staleness_exceeded"
    assert body["error"]["version_span"] == 3
