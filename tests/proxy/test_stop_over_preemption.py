"""A stop string that an update cuts ends the generation all the same, at the same token, on every API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from chat_rig import TOKENIZER, api_settings, write_tokenizer
from proxy_rig import Proxy, running_proxy
from scripted_engine import ScriptedEngine
from update_calls import cut_once, read

from schemas.events import TokenSegment
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker

BODY = [1, 2, 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def script(engine: ScriptedEngine, spoken: str, hold_at: int) -> None:
    """It says this, whatever was said of it already, and stands still once, behind so many tokens; it knows no stops."""
    whole, start = encode(spoken), len(BODY)
    engine.text_of = TOKENIZER.decode
    engine.held_at = hold_at

    def rest(prompt: list[int]) -> list[int]:
        nonlocal start
        if not engine.bodies[1:]:
            start = len(prompt)
        return [*whole[len(prompt) - start :], TOKENIZER.eos_token_id]

    engine.tokens = rest


def sampling(stop: Any, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 200, "stop": stop, **more}


CASES = [
    ("abc ###END and more", 5, ["###"], "###", "abc "),
    ("abc ###END and more", 6, "###", "###", "abc "),
    ("né€→é→€ rest", 7, ["€→é"], "€→é", "né"),  # the cut is inside a character of the string
    ("a b STOP here", 5, ["nothing", "STOP"], "STOP", "a b "),
]


@pytest.mark.parametrize(("spoken", "hold", "stop", "matched", "text"), CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_native(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path, spoken: str, hold: int, stop: Any,
    matched: str, text: str, stream: bool,
) -> None:  # fmt: skip
    script(engine, spoken, hold)
    expected = encode(spoken[: spoken.index(matched) + len(matched)])
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        body = {
            "input_ids": BODY,
            "sampling_params": sampling(stop),
            "stream": stream,
            "return_logprob": True,
        }
        url = opened["base_url"] + "/generate"
        if stream:
            frames = [orjson.loads(f) for f in await cut_once(proxy, engine, frames_of(proxy, url, body))]
            assert all(len(frame["output_ids"]) <= len(expected) for frame in frames)
            reply = frames[-1]
        else:
            _, reply = await cut_once(proxy, engine, proxy.post(url, body))
    meta = reply["meta_info"]
    assert (reply["output_ids"], reply["text"]) == (expected, text)
    assert meta["finish_reason"] == {"type": "stop", "matched": matched}
    assert (len(meta["output_token_logprobs"]), meta["hoofprint"]["preemptions"]) == (len(expected), 1)
    (segment,) = await read(settings, SEGMENTS, TokenSegment)
    assert (ids_of(segment.output_ids).tolist(), segment.finish_reason) == (expected, "stop")
    assert segment.spans[-1].stop == len(expected)
    assert not engine.running


async def frames_of(proxy: Proxy, url: str, body: Any) -> list[bytes]:
    async with proxy.http.post(url, json=body) as reply:
        lines = (await reply.read()).split(b"\n\n")
    return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]


@pytest.mark.parametrize(("spoken", "hold", "stop", "matched", "text"), CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_chat(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path, spoken: str, hold: int, stop: Any,
    matched: str, text: str, stream: bool,
) -> None:  # fmt: skip
    script(engine, spoken, hold)
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        body = {
            "model": "p", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "stop": stop,
            "stream": stream,
        }  # fmt: skip
        url = opened["base_url"] + "/v1/chat/completions"
        if stream:
            chunks = [orjson.loads(f) for f in await cut_once(proxy, engine, frames_of(proxy, url, body))]
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
            said = "".join(choice["delta"].get("content") or "" for choice in choices)
            finish = choices[-1]["finish_reason"]
        else:
            _, reply = await cut_once(proxy, engine, proxy.post(url, body))
            said = reply["choices"][0]["message"]["content"]
            finish = reply["choices"][0]["finish_reason"]
    assert (said, finish) == (text, "stop")
    (segment,) = await read(settings, SEGMENTS, TokenSegment)
    assert ids_of(segment.output_ids).tolist() == encode(spoken[: spoken.index(matched) + len(matched)])


async def test_without_a_tokenizer_it_is_counted(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    script(engine, "ab##", 3)
    settings = api_settings(broker, tmp_path, engine, tmp_path / "none")
    async with running_proxy(settings) as proxy:
        body = {"input_ids": BODY, "sampling_params": sampling("##")}
        url = (await proxy.open())["base_url"] + "/generate"
        status, _ = await cut_once(proxy, engine, proxy.post(url, body))
        async with proxy.http.get(proxy.base + "/metrics") as reply:
            text = await reply.text()
    assert status == 200
    assert 'hoofprint_inexact_resumes_total{field="stop"} 1.0' in text


async def test_output_that_follows_a_grammar_begins_anew(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    engine.held_at = 3
    asked = {"max_new_tokens": 8, "json_schema": "{}"}
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        body = {"input_ids": BODY, "sampling_params": asked}
        url = opened["base_url"] + "/generate"
        _, reply = await cut_once(proxy, engine, proxy.post(url, body))
    assert [b["input_ids"] for b in engine.bodies] == [BODY, BODY]
    assert [b["sampling_params"]["max_new_tokens"] for b in engine.bodies] == [8, 8]
    assert reply["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 8}]
    (segment,) = await read(settings, SEGMENTS, TokenSegment)
    assert (len(ids_of(segment.output_ids)), segment.preemptions) == (8, 1)


async def test_a_stream_that_follows_a_grammar_ends_with_an_error_frame_and_leaves_no_segment(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = api_settings(broker, tmp_path, engine, checkpoint)
    engine.held_at = 3
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        body = {"input_ids": BODY, "sampling_params": {"max_new_tokens": 8, "regex": "a*"}, "stream": True}
        frames = await cut_once(proxy, engine, frames_of(proxy, opened["base_url"] + "/generate", body))
        assert orjson.loads(frames[-1])["error"]["code"] == "generation_preempted"
        assert (await proxy.generate(opened, BODY, 2))[0] == 200
    assert len(await read(settings, SEGMENTS, TokenSegment)) == 1
