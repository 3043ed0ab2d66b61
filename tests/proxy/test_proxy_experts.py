"""Routed experts through the whole proxy: a mixture-of-experts model on the CPU engine, turns, a pause, a branch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moe_checkpoint import write_moe
from numpy.typing import NDArray
from proxy_rig import Proxy, log_of, running_proxy, settings_for
from scripted_engine import ScriptedEngine

from journal.payloads import PayloadStore
from proxy.experts import unpack_experts
from schemas.arrow import EXPERTS_CODEC
from schemas.events import TokenSegment
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS
from stack.engine.launch import EngineProcess

pytestmark = [pytest.mark.broker, pytest.mark.engine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe") / "seed1", seed=1)


@pytest.fixture(scope="module")
def moe_engine(checkpoint: Path) -> Iterator[str]:
    with EngineProcess(checkpoint, min_step_ms=5) as process:
        yield process.base_url


def routed(checkpoint: Path, ids: list[int]) -> NDArray[np.int32]:
    """(positions, layers * top_k) as transformers routes them; the middle layer is dense: zeros."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    rows = np.zeros((len(ids), 3, 2), np.int32)
    for layer, scores in zip((0, 2), logits, strict=True):
        rows[:, layer] = torch.softmax(scores, -1).topk(2, -1).indices.numpy()
    return rows.reshape(len(ids), -1)


async def segments(settings: Settings) -> list[TokenSegment]:
    return await asyncio.to_thread(log_of, settings, SEGMENTS, TokenSegment)


async def until_used(proxy: Proxy, engine: str, tokens: int) -> None:
    """Wait until the engine's running requests have so many tokens."""
    for _ in range(2000):
        async with proxy.http.get(engine + "/v1/loads") as reply:
            if (await reply.json())["loads"][0]["num_used_tokens"] >= tokens:
                return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine did not get there")


async def test_segments_have_the_experts_of_their_tokens(
    broker: str, tmp_path: Path, moe_engine: str, checkpoint: Path
) -> None:
    settings = settings_for(broker, tmp_path, [moe_engine], engine={"model": str(checkpoint)})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        _, first = await proxy.generate(opened, [5, 6, 7], 4)
        context = [5, 6, 7, *first["output_ids"], 8, 9]
        asked = asyncio.ensure_future(proxy.generate(opened, context, 120))
        await until_used(proxy, moe_engine, len(context) + 3)
        assert (await proxy.post("/v1/rollout/pause", {}))[0] == 200
        assert (await proxy.post("/v1/rollout/resume", {}))[0] == 200
        assert (await asked)[0] == 200
        await proxy.generate(opened, [5, 6, 7, *first["output_ids"], 10], 3)  # a branch
    one, two, branch = await segments(settings)
    assert two.preemptions == 1
    store = PayloadStore(settings.payload_url)
    found = []
    for segment in (one, two, branch):
        assert segment.experts is not None
        assert segment.experts.codec == EXPERTS_CODEC
        found.append(unpack_experts(store.get(segment.experts)))
    assert [rows.dtype for rows in found] == [np.uint8] * 3
    whole = [*context, *ids_of(two.output_ids).tolist()]
    np.testing.assert_array_equal(np.concatenate(found[:2]), routed(checkpoint, whole)[:-1])
    other = [*context[:7], 10, *ids_of(branch.output_ids).tolist()]
    np.testing.assert_array_equal(np.concatenate([found[0], found[2]]), routed(checkpoint, other)[:-1])


async def test_experts_are_asked_for_only_where_they_are_wanted_and_known(
    broker: str, tmp_path: Path, moe_engine: str, checkpoint: Path, engine: ScriptedEngine
) -> None:
    off = settings_for(
        broker,
        tmp_path,
        [moe_engine],
        engine={"model": str(checkpoint)},
        proxy={"record_routed_experts": "off"},
    )
    dense = settings_for(broker, tmp_path, [engine.url])
    for settings in (off, dense):
        async with running_proxy(settings) as proxy:
            assert (await proxy.generate(await proxy.open(), [5, 6, 7], 4))[0] == 200
        assert [s.experts for s in await segments(settings)] == [None]
    assert "return_routed_experts" not in engine.bodies[0]
