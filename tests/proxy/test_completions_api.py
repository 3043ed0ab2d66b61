"""OpenAI's text completions, and reasoning and structure in chat, with the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from chat_rig import CALLS, THOUGHT, TOKENIZER, api_settings, says, segments, write_tokenizer
from proxy_rig import running_proxy
from scripted_engine import ScriptedEngine

from schemas.tokens import ids_of

pytestmark = pytest.mark.broker

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
USER: Any = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def client_of(opened: dict[str, Any]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened["base_url"] + "/v1", api_key="none", max_retries=0)


async def test_text_goes_on_from_the_tokens_of_the_step_it_begins_with(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = lambda _: list(TOKENIZER.encode("grüße 👋"))
    engine.matched = "no token"  # what ends it is not part of its text
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        first = await client.completions.create(model="policy", prompt="say: ", logprobs=1, max_tokens=50)
        assert (first.choices[0].text, first.choices[0].finish_reason) == ("grüße 👋", "stop")
        logprobs = first.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs.tokens or []) == len(TOKENIZER.encode("grüße 👋"))
        await client.completions.create(model="policy", prompt="say: grüße 👋 and")
        await client.completions.create(model="policy", prompt=[*TOKENIZER.encode("say: grüße 👋"), 5])
        stream = await client.completions.create(
            model="policy", prompt="other", stream=True, max_tokens=50, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "grüße 👋"
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].usage is None) == ("stop", False)
    recorded = await segments(settings)
    assert [s.parent_segment_index for s in recorded] == [None, 0, 0, None]
    assert [s.lineage_reason for s in recorded] == ["first", None, "branch", "history_rewrite"]
    assert ids_of(recorded[1].context_ids).tolist() == TOKENIZER.encode(" and")
    assert {s.api for s in recorded} == {"completions"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, "b"]}, "prompt"),
    ({"prompt": [5000]}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "s"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logit_bias": {"1": 1}}, "logit_bias"),
]


async def test_completions_that_cannot_be_honoured_are_refused_by_name(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        for body, field in REFUSED:
            status, reply = await proxy.post(opened["base_url"] + "/v1/completions", {"prompt": "x", **body})
            assert (status, reply["error"]["param"]) == (400, field), body
    assert engine.bodies == []


async def test_chat_splits_reasoning_whole_and_streamed(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens = says(THOUGHT + "I look." + CALLS, THOUGHT + "spoken words")
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        one_call: Any = {"parallel_tool_calls": False}
        first: Any = await client.chat.completions.create(
            model="policy", messages=[USER], tools=TOOLS, **one_call
        )
        message = first.choices[0].message
        assert (message.reasoning_content, message.content) == ("let me see", "I look.")
        assert len(message.tool_calls) == 2
        told: Any = message.model_dump(exclude_none=True)
        given = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message.tool_calls]
        stream: Any = await client.chat.completions.create(
            model="policy", messages=[USER, told, *given], tools=TOOLS, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "let me see"
    assert "".join(d.content or "" for d in deltas) == "spoken words"
    recorded = await segments(settings)
    assert len({s.lineage_id for s in recorded}) == 1
    assert engine.bodies[0]["sampling_params"]["stop"] == ["</tool_call>"]


async def test_structure_that_an_engine_cannot_give_is_its_refusal_by_the_clients_name(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.refuses = "json_schema"
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    async with running_proxy(settings) as proxy:
        client = client_of(await proxy.open())
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="policy", messages=[USER], response_format=shape, stream=stream
                )
            assert (refused.value.code, refused.value.param) == ("engine_rejected", "response_format")
