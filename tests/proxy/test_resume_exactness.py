"""On the real CPU engine, a generation that is cut and resumed draws the tokens of one that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import Proxy, running_proxy, settings_for, until
from tiny_chat import write_chat_checkpoint

from stack.engine.launch import EngineProcess

pytestmark = [pytest.mark.broker, pytest.mark.engine]

LENGTH = 160


@pytest.fixture(scope="module")
def cpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkpoint = write_chat_checkpoint(tmp_path_factory.mktemp("chat"))
    with EngineProcess(checkpoint, min_step_ms=5) as process:
        yield process.base_url


async def generated(proxy: Proxy, sample: int, sampling: dict[str, Any], cuts: int) -> tuple[Any, int]:
    """Tokens with log-probs, and how often the generation was cut."""
    opened = await proxy.open(sample=sample)
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
    call = asyncio.ensure_future(proxy.post(opened["base_url"] + "/generate", body))
    running = proxy.parts.policy._controller.running
    for _ in range(cuts):
        await until(lambda: running or call.done(), "the engine call")
        await asyncio.sleep(0.1)
        await proxy.post("/v1/rollout/pause", {})
        await proxy.post("/v1/rollout/resume", {})
    _, reply = await call
    return reply["meta_info"]["output_token_logprobs"], reply["meta_info"]["hoofprint"]["preemptions"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"ignore_eos": True},
        {"frequency_penalty": 0.7, "ignore_eos": True},
        {"frequency_penalty": -0.5, "temperature": 0.8, "ignore_eos": True, "logit_bias": {"65": 1.5}},
        {"frequency_penalty": 0.3, "min_new_tokens": LENGTH},
        {"temperature": 0.0, "frequency_penalty": 1.0, "ignore_eos": True},
    ],
)
async def test_seed_penalty_bias_and_minimum_hold_over_cuts(
    broker: str, tmp_path: Path, cpu_engine: str, sampling: dict[str, Any]
) -> None:
    asked = {"max_new_tokens": LENGTH, "sampling_seed": 11, **sampling}
    settings = settings_for(broker, tmp_path, [cpu_engine])
    async with running_proxy(settings) as proxy:
        whole, uncut = await generated(proxy, 0, asked, 0)
        pieces, cuts = await generated(proxy, 1, asked, 2)
        assert proxy.parts.metrics.counts["inexact_resumes"] == 0
    assert (uncut, cuts > 0) == (0, True)
    assert [token for _, token, _ in pieces] == [token for _, token, _ in whole]
    assert [lp for lp, _, _ in pieces] == pytest.approx([lp for lp, _, _ in whole], abs=1e-3)


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty"])
async def test_what_cannot_be_handed_on_is_counted(
    broker: str, tmp_path: Path, cpu_engine: str, field: str
) -> None:
    asked = {"max_new_tokens": LENGTH, "sampling_seed": 11, "ignore_eos": True, field: 1.3}
    settings = settings_for(broker, tmp_path, [cpu_engine])
    async with running_proxy(settings) as proxy:
        _, cuts = await generated(proxy, 1, asked, 1)
        async with proxy.http.get(proxy.base + "/metrics") as reply:
            text = await reply.text()
    assert cuts == 1
    assert f'hoofprint_inexact_resumes_total{{field="{field}"}} 1.0' in text
