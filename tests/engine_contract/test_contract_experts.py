"""Routed experts: SGLang's rows, equal to what transformers routes, whatever was computed before."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_engines import started
from engine_client import Client
from moe_checkpoint import write_moe
from numpy.typing import NDArray

from stack.engine.launch import EngineProcess

LAYERS, TOP_K = 3, 2
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe") / "seed1", seed=1, dense=())


@pytest.fixture(scope="session")
def moe_engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[EngineProcess]:
    with started(request.param[0], checkpoint) as process:
        yield process


@pytest.fixture
async def moe(moe_engine: EngineProcess) -> AsyncIterator[Client]:
    async with Client(moe_engine.base_url) as client:
        await client.until_idle()
        yield client


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint)


def routed(model: Any, ids: list[int]) -> NDArray[np.int32]:
    """What transformers routes: (positions, layers, top_k)."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    chosen = [torch.softmax(scores, -1).topk(TOP_K, -1).indices.numpy() for scores in logits]
    return np.stack(chosen, axis=1).astype(np.int32)


def rows_of(meta: dict[str, Any]) -> NDArray[np.int32]:
    raw = base64.b64decode(meta["routed_experts"])
    return np.frombuffer(raw, "<i4").reshape(-1, LAYERS, TOP_K)


def body(ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "sampling_seed": 1}
    return {"input_ids": ids, "sampling_params": sampling, "return_routed_experts": True, **more}


async def test_rows_are_what_transformers_routes_also_behind_a_cached_prefix(moe: Client, model: Any) -> None:
    _, first = await moe.post("/generate", body(PROMPT, 6))
    whole = [*PROMPT, *first["output_ids"]]
    np.testing.assert_array_equal(rows_of(first["meta_info"]), routed(model, whole)[:-1])
    _, second = await moe.post("/generate", body([*whole, 11, 12], 4, routed_experts_start_len=3))
    assert second["meta_info"]["cached_tokens"] == len(whole) - 1
    longer = [*whole, 11, 12, *second["output_ids"]]
    np.testing.assert_array_equal(rows_of(second["meta_info"]), routed(model, longer)[3:-1])


async def test_rows_come_with_the_last_chunk_alone(moe: Client, model: Any) -> None:
    chunks = [chunk["meta_info"] async for chunk in moe.stream(body([20, 21], 5))]
    assert ["routed_experts" in meta for meta in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(rows_of(chunks[-1])) == 2 + 5 - 1


async def test_an_aborted_request_has_the_rows_of_what_it_generated(moe: Client, model: Any) -> None:
    last: dict[str, Any] = {}
    async for chunk in moe.stream(body([30, 31, 32], 400, rid="cut")):
        last = chunk
        if len(chunk["output_ids"]) == 3:
            await moe.post("/abort_request", {"rid": "cut"})
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    ids = [30, 31, 32, *last["output_ids"]]
    np.testing.assert_array_equal(rows_of(last["meta_info"]), routed(model, ids)[:-1])


async def test_samples_of_one_prompt_share_its_rows(moe: Client, model: Any) -> None:
    import asyncio

    asked = [moe.post("/generate", body([40, 41, 42], 3)) for _ in range(3)]
    for _, answer in await asyncio.gather(*asked):
        ids = [40, 41, 42, *answer["output_ids"]]
        np.testing.assert_array_equal(rows_of(answer["meta_info"]), routed(model, ids)[:-1])


async def test_an_engine_says_whether_it_can_be_asked(moe: Client) -> None:
    assert (await moe.get("/server_info"))[1]["enable_return_routed_experts"] is True
    status, answer = await moe.post("/generate", body(PROMPT, 1, routed_experts_start_len=6))
    assert (status, "routed_experts_start_len" in answer["error"]["message"]) == (400, True)


async def test_a_dense_model_answers_without_rows(client: Client) -> None:
    assert (await client.get("/server_info"))[1]["enable_return_routed_experts"] is False
    status, answer = await client.post("/generate", body([1, 2], 1))
    assert (status, "routed_experts" in answer["meta_info"]) == (200, False)
