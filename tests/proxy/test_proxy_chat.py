"""Chat completions with the official client: token-in token-out over turns, tools, streams, stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from proxy_rig import Proxy, log_of, running_proxy, settings_for
from scripted_engine import ScriptedEngine
from tiny_chat import tiny_tokenizer

from schemas.events import TokenSegment
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker

TOKENIZER = tiny_tokenizer()
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
USER: Any = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return directory


def says(*replies: str, end: bool = True) -> Callable[[list[int]], list[int]]:
    """The engine's script: the replies in turn, each closed by the end mark."""
    left = list(replies)

    def tokens(_prompt: list[int]) -> list[int]:
        ids = TOKENIZER.encode(left.pop(0), add_special_tokens=False)
        return [*ids, TOKENIZER.eos_token_id] if end else ids

    return tokens


def client_of(proxy: Proxy, opened: dict[str, Any]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened["base_url"] + "/v1", api_key="none", max_retries=0)


def chat_settings(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path, **proxy: Any
) -> Settings:
    engines = {"engines": [engine.url], **proxy}
    return settings_for(broker, tmp_path, [], engine={"model": str(checkpoint)}, proxy=engines)


async def segments(settings: Settings) -> list[TokenSegment]:
    return await asyncio.to_thread(log_of, settings, SEGMENTS, TokenSegment)


def text_of(*parts: bytes) -> str:
    return str(TOKENIZER.decode([i for part in parts for i in ids_of(part).tolist()]))


async def test_turns_append_token_exactly(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("grüße 👋 ", "bye")
    settings = chat_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        client = client_of(proxy, opened)
        first = await client.chat.completions.create(model="policy", messages=[USER], logprobs=True)
        answer = first.choices[0].message.content
        assert (answer, first.choices[0].finish_reason) == ("grüße 👋 ", "stop")
        history: Any = [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
        second = await client.chat.completions.create(
            model="policy", messages=history, temperature=0.5, seed=4
        )
        assert second.choices[0].message.content == "bye"
    one, two = await segments(settings)
    assert text_of(one.context_ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(two.context_ids) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert one.lineage_id == two.lineage_id
    assert (one.tito_mismatch_tokens, two.tito_mismatch_tokens) == (0, 0)
    kept = (
        ids_of(one.context_ids).tolist() + ids_of(one.output_ids).tolist() + ids_of(two.context_ids).tolist()
    )
    assert engine.bodies[1]["input_ids"] == kept
    sampling = engine.bodies[1]["sampling_params"]
    assert (sampling["temperature"], sampling["sampling_seed"]) == (0.5, 4)
    assert first.usage is not None
    assert first.usage.completion_tokens == len(ids_of(one.output_ids))
    logprobs = first.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or []) == len(ids_of(one.output_ids))
    assert first.model_extra is not None
    assert first.model_extra["hoofprint"]["segment_index"] == 0


async def test_a_stream_gives_the_same_text_in_pieces_with_usage(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.delay_s = 0.002
    engine.tokens = says("a 👋 stream of text")
    settings = chat_settings(broker, tmp_path, engine, checkpoint, stream_frame_s=0.0)  # a frame per token
    async with running_proxy(settings) as proxy:
        client = client_of(proxy, await proxy.open())
        stream = await client.chat.completions.create(
            model="policy", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(pieces) == "a 👋 stream of text"
    assert len(pieces) > 3
    assert "\ufffd" not in "".join(pieces)
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert len(await segments(settings)) == 1


async def test_tool_calls_whole_and_streamed_and_their_results_append(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    call = 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    engine.tokens = says(call, "it is x", call)
    settings = chat_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(proxy, await proxy.open())
        first = await client.chat.completions.create(model="policy", messages=[USER], tools=TOOLS)
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert choice.message.tool_calls is not None
        asked: Any = choice.message.tool_calls[0]
        assert (asked.function.name, asked.function.arguments) == ("look", '{"at":"x"}')
        told: Any = choice.message.model_dump(exclude_none=True, exclude={"refusal"})
        result: Any = {"role": "tool", "tool_call_id": asked.id, "content": "x"}
        second = await client.chat.completions.create(
            model="policy", messages=[USER, told, result], tools=TOOLS
        )
        assert second.choices[0].message.content == "it is x"
        again: Any = [USER, told, result, {"role": "assistant", "content": "it is x"}, USER]
        stream = await client.chat.completions.create(
            model="policy", messages=again, tools=TOOLS, stream=True
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    calls = [t for c in chunks for t in c.choices[0].delta.tool_calls or []]
    assert text.strip() == "Let me see."
    assert [c.function.name for c in calls if c.function] == ["look"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    recorded = await segments(settings)
    assert len({s.lineage_id for s in recorded}) == 1
    assert "<tool_response>\nx\n" in text_of(recorded[1].context_ids)


async def test_rewritten_history_and_other_tools_start_lineages_and_a_retry_branches(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("one", "two", "two again", "three", "four")
    settings = chat_settings(broker, tmp_path, engine, checkpoint)
    turn: Any = [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "next"}]
    async with running_proxy(settings) as proxy:
        client = client_of(proxy, await proxy.open())
        rewritten: Any = [{"role": "user", "content": "changed"}, *turn[1:]]
        for messages in ([USER], turn, turn, rewritten):
            await client.chat.completions.create(model="policy", messages=messages)
        await client.chat.completions.create(model="policy", messages=turn, tools=TOOLS)
    recorded = await segments(settings)
    assert [s.lineage_reason for s in recorded] == [
        "first",
        None,
        "branch",
        "history_rewrite",
        "tools_changed",
    ]
    assert [s.parent_segment_index for s in recorded] == [None, 0, 0, None, None]
    assert recorded[1].request_digest == recorded[2].request_digest


async def test_stop_strings_are_cut_and_never_streamed(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = chat_settings(broker, tmp_path, engine, checkpoint)

    def tokens(_prompt: list[int]) -> list[int]:
        return list(TOKENIZER.encode("keep STOP", add_special_tokens=False))

    engine.tokens, engine.matched = tokens, "STOP"
    async with running_proxy(settings) as proxy:
        client = client_of(proxy, await proxy.open())
        whole = await client.chat.completions.create(model="policy", messages=[USER], stop=["STOP"])
        stream = await client.chat.completions.create(
            model="policy", messages=[USER], stop="STOP", stream=True
        )
        streamed = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert (whole.choices[0].message.content, streamed) == ("keep ", "keep ")
    assert engine.bodies[0]["sampling_params"]["stop"] == ["STOP"]


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [USER], "n": 2}, "n"),
    ({"messages": [USER], "temperature": "hot"}, "temperature"),
    ({"messages": [USER], "top_p": 2}, "top_p"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [USER], "max_completion_tokens": True}, "max_completion_tokens"),
    ({"messages": [USER], "stop": [1]}, "stop"),
    ({"messages": [USER], "seed": 1.5}, "seed"),
    ({"messages": [USER], "logit_bias": {"1": 5}}, "logit_bias"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER], "tools": [1]}, "tools[0]"),
    ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": [USER], "functions": [{}]}, "functions"),
    ({"messages": [USER], "stream_options": [1]}, "stream_options"),
]


async def test_malformed_chat_requests_are_refused_by_name_and_advisory_fields_counted(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("fine", "fine")
    settings = chat_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        for body, field in MALFORMED:
            status, reply = await proxy.post(opened["base_url"] + "/v1/chat/completions", body)
            assert (status, reply["error"]["field"]) == (400, field), body
        assert engine.bodies == []
        body = {"messages": [USER], "user": "me", "metadata": {}, "store": False, "reasoning_effort": "low"}
        status, _ = await proxy.post(opened["base_url"] + "/v1/chat/completions", body)
        assert status == 200
        assert proxy.parts.metrics.counts["ignored_fields"] == 4


async def test_an_openai_error_has_its_class_and_code(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says("x")
    settings = chat_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(proxy, await proxy.open())
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=[USER], n=3)
        assert (refused.value.code, refused.value.param) == ("invalid_request", "n")
        models = await client.models.list()
        assert [m.id for m in models.data] == ["policy"]
        await engine.stop()
        with pytest.raises(openai.InternalServerError) as away:
            await client.chat.completions.create(model="policy", messages=[USER])
        assert (away.value.status_code, away.value.code) == (503, "engine_unavailable")


async def test_a_checkpoint_without_a_tokenizer_says_so(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], engine={"model": str(tmp_path)})
    async with running_proxy(settings) as proxy:
        status, reply = await proxy.post("/v1/chat/completions", {"messages": [USER]})
        assert (status, reply["error"]["field"]) == (400, "messages")
        assert "tokenizer" in reply["error"]["message"]
