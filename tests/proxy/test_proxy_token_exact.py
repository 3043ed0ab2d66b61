"""Token-exactness through the proxy: sub-agents side by side, agents that rewrite, characters cut by a weight update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import Proxy, log_of, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine
from tiny_chat import tiny_tokenizer
from tokenizer_subjects import subject, whole_text

from schemas.events import TokenSegment
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS
from stack.models.qwen3_tokenizer import ensure_qwen3_tokenizer

pytestmark = pytest.mark.broker

TOKENIZER = tiny_tokenizer()
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return directory


def settings_of(broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path) -> Settings:
    return settings_for(broker, tmp_path, [engine.url], engine={"model": str(checkpoint)})


async def segments(settings: Settings) -> list[TokenSegment]:
    return await asyncio.to_thread(log_of, settings, SEGMENTS, TokenSegment)


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


def echo(prompt: list[int]) -> list[int]:
    """Answers with the last question in capitals."""
    question = text_of(prompt).rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
    return [*TOKENIZER.encode(question.upper(), add_special_tokens=False), TOKENIZER.eos_token_id]


def writes(text: str) -> Callable[[list[int]], list[int]]:
    return lambda _: [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


async def chat(proxy: Proxy, opened: dict[str, Any], messages: list[Any], **more: Any) -> dict[str, Any]:
    status, reply = await proxy.post(
        opened["base_url"] + "/v1/chat/completions", {"messages": messages, **more}
    )
    assert status == 200, reply
    return reply


async def test_agents_side_by_side_in_one_session_keep_their_lineages(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens, engine.delay_s = echo, 0.001
    settings = settings_of(broker, tmp_path, engine, checkpoint)

    async def agent(proxy: Proxy, opened: dict[str, Any], name: str) -> None:
        messages: list[Any] = [{"role": "system", "content": f"You are {name}."}]
        for turn in range(3):
            messages.append(user(f"{name} {turn}"))
            reply = await chat(proxy, opened, messages)
            messages.append(reply["choices"][0]["message"])
            assert messages[-1]["content"] == f"{name} {turn}".upper()

    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        await asyncio.gather(*(agent(proxy, opened, name) for name in ("ann", "bob", "cy", "di")))
    recorded = await segments(settings)
    assert sorted(s.segment_index for s in recorded) == list(range(12))
    lineages: dict[str, list[int]] = {}
    for segment in sorted(recorded, key=lambda s: s.segment_index):
        tokens = lineages.setdefault(segment.lineage_id, [])
        tokens += [*ids_of(segment.context_ids).tolist(), *ids_of(segment.output_ids).tolist()]
    assert len(lineages) == 4
    for tokens in lineages.values():
        name = text_of(tokens).split("You are ")[1].split(".")[0]
        assert text_of(tokens).count(f"{name} ") == 3
        assert (
            len([1 for body in engine.bodies if tokens[: len(body["input_ids"])] == body["input_ids"]]) == 3
        )


async def test_two_continuations_of_one_turn_at_once_are_an_append_and_a_branch(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    engine.tokens, engine.delay_s = echo, 0.001
    settings = settings_of(broker, tmp_path, engine, checkpoint)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        await chat(proxy, opened, [user("a")])
        await asyncio.gather(*(chat(proxy, opened, [user("a"), said("A"), user(q)]) for q in ("b", "c")))
    first, one, two = sorted(await segments(settings), key=lambda s: s.segment_index)
    assert [one.parent_segment_index, two.parent_segment_index] == [0, 0]
    assert (one.lineage_reason, two.lineage_reason) == (None, "branch")
    assert two.branch_point == (len(first.context_ids) + len(first.output_ids)) // 4
    assert one.lineage_id == first.lineage_id != two.lineage_id


async def test_what_an_agent_may_change_appends_and_what_not_starts_anew(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    written = ' A  b\n<tool_call>\n{"name":"look","arguments":{"n":2.0,"q":"x"}}\n</tool_call>'
    engine.tokens = writes(written)
    settings = settings_of(broker, tmp_path, engine, checkpoint)
    system: dict[str, Any] = {"role": "system", "content": "Be kind."}
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        reply = await chat(proxy, opened, [system, user("q")], tools=TOOLS)
        call = reply["choices"][0]["message"]["tool_calls"][0]
        again = {
            **call,
            "id": call["id"].replace("_", "-"),
            "function": {**call["function"], "arguments": '{"q": "x", "n": 2}'},
        }
        answer = {"role": "assistant", "content": "A b", "tool_calls": [again]}
        result = {"role": "tool", "tool_call_id": again["id"], "content": "<|im_end|>"}
        engine.tokens = writes("done")
        await chat(proxy, opened, [system, user("q"), answer, result], tools=TOOLS)
        other = {**system, "content": "Be brief."}
        await chat(proxy, opened, [other, user("q"), answer, result], tools=TOOLS)
    one, two, three = await segments(settings)
    assert (two.parent_segment_index, two.lineage_reason) == (0, None)
    assert two.tito_mismatch_tokens > 0
    output = ids_of(one.output_ids).tolist()
    assert text_of(output[:-1]) == written
    assert engine.bodies[1]["input_ids"][: len(engine.bodies[0]["input_ids"]) + len(output)] == [
        *engine.bodies[0]["input_ids"],
        *output,
    ]
    context = ids_of(two.context_ids).tolist()
    assert "<tool_response>\n<|im_end|>\n</tool_response>" in text_of(context)
    assert context.count(TOKENIZER.eos_token_id) == 1
    assert (three.parent_segment_index, three.lineage_reason) == (None, "history_rewrite")


async def test_a_character_cut_by_an_update_is_whole_in_text_and_tokens(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    spoken = "née 👋🏽 漢!"
    whole = TOKENIZER.encode(spoken, add_special_tokens=False)
    engine.held_at = 7  # two bytes of the four of the hand
    assert text_of(whole[:7]).endswith("\ufffd")
    engine.text_of = text_of
    settings = settings_of(broker, tmp_path, engine, checkpoint)
    start = TOKENIZER.encode("say", add_special_tokens=False)

    def rest(prompt: list[int]) -> list[int]:
        done = len(prompt) - asked
        return [*whole[done:], TOKENIZER.eos_token_id]

    async def cut(proxy: Proxy, work: Any) -> Any:
        engine.go.clear()
        holds = engine.holds
        running = asyncio.ensure_future(work)
        await until(lambda: engine.holds > holds, "half a character")
        assert (await proxy.post("/v1/rollout/pause", {}))[0] == 200
        engine.go.set()
        assert (await proxy.post("/v1/rollout/resume", {}))[0] == 200
        return await running

    async with running_proxy(settings) as proxy:
        asked, engine.tokens = len(start), rest
        _, native = await cut(proxy, proxy.generate(await proxy.open(), start, 99))
        prompt = TOKENIZER.apply_chat_template([user("say")], tokenize=False, add_generation_prompt=True)
        asked = len(TOKENIZER.encode(prompt, add_special_tokens=False))
        chatted = await cut(proxy, chat(proxy, await proxy.open(sample=1), [user("say")]))
    for segment in await segments(settings):
        assert segment.preemptions == 1
        assert ids_of(segment.output_ids).tolist() == [*whole, TOKENIZER.eos_token_id]
    first, resumed = engine.bodies[0]["input_ids"], engine.bodies[1]["input_ids"]
    assert resumed == [*first, *whole[:7]]
    assert native["text"] == spoken
    assert chatted["choices"][0]["message"]["content"] == spoken


async def test_qwen3_thinks_on_through_tools_and_starts_anew_where_its_template_forgets(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    qwen = subject("qwen3")
    settings = settings_of(broker, tmp_path, engine, ensure_qwen3_tokenizer())
    engine.vocabulary = 151_669

    def speak(text: str) -> None:
        engine.tokens = lambda _: [*qwen.encode(text), qwen.eos_token_id or 0]

    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        speak(
            '<think>\nI must look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        )
        messages: list[Any] = [user("what is it?")]
        messages.append((await chat(proxy, opened, messages, tools=TOOLS))["choices"][0]["message"])
        assert messages[1]["reasoning_content"] == "I must look."
        call = messages[1]["tool_calls"][0]["id"]
        messages.append({"role": "tool", "tool_call_id": call, "content": "a cat"})
        speak("<think>\nA cat.\n</think>\n\nIt is a cat 🐈.")
        messages.append((await chat(proxy, opened, messages, tools=TOOLS))["choices"][0]["message"])
        messages.append(user("sure?"))
        speak("Yes.")
        await chat(proxy, opened, messages, tools=TOOLS)
    one, two, three = await segments(settings)
    assert (two.parent_segment_index, two.tito_mismatch_tokens) == (one.segment_index, 0)
    assert engine.bodies[1]["input_ids"] == qwen.prompt(messages[:3], TOOLS, {})
    assert (three.parent_segment_index, three.lineage_reason) == (None, "history_rewrite")
    assert engine.bodies[2]["input_ids"] == qwen.prompt(messages, TOOLS, {})
    seen = whole_text(qwen, engine.bodies[2]["input_ids"])
    assert "It is a cat 🐈.<|im_end|>" in seen
    assert "A cat." not in seen
