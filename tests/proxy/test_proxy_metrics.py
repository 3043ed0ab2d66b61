"""What /metrics says after a few calls whose numbers are known."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxy_rig import Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker


async def numbers(proxy: Proxy) -> dict[str, float]:
    """Samples by name and labels."""
    async with proxy.http.get(proxy.base + "/metrics") as reply:
        text = await reply.text()
    return {
        sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_latency_is_split_and_bytes_are_counted(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.delay_s = 0.02
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        before = await numbers(proxy)
        body: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5}}
        async with proxy.http.post(opened["base_url"] + "/generate", json=body) as reply:
            answer = await reply.read()
            sent = int(reply.request_info.headers.get("Content-Length", 0)) or None
        async with proxy.http.post(opened["base_url"] + "/generate", data=b"{") as reply:
            refused = await reply.read()
        after = await numbers(proxy)
    parts = [after[f"hoofprint_{part}_seconds_sum"] for part in ("engine", "log", "own")]
    assert [after[f"hoofprint_{part}_seconds_count"] for part in ("engine", "log", "own")] == [1, 1, 1]
    assert parts[0] >= 5 * 0.02
    assert all(part >= 0 for part in parts)
    received = (
        after["hoofprint_bytes_total,direction=received"] - before["hoofprint_bytes_total,direction=received"]
    )
    given = after["hoofprint_bytes_total,direction=sent"] - before["hoofprint_bytes_total,direction=sent"]
    assert sent is None or received == sent + 1
    assert received > 1
    assert given - len(answer) - len(refused) > 0  # and the first reading of the metrics
    assert after["hoofprint_refusals_total,code=invalid_request"] == 1
    assert after["hoofprint_requests_total,api=/generate,status=200"] == 1
    assert after["hoofprint_requests_total,api=/generate,status=400"] == 1
    assert after["hoofprint_output_tokens_total"] == 5


async def test_preempts_resumes_switches_and_queues_are_counted(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    engine.held_at = second_engine.held_at = 2
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 6))
        await until(lambda: engine.running or second_engine.running, "the engine call")
        busy = await numbers(proxy)
        assert (busy["hoofprint_inflight"], busy["hoofprint_open_sessions"]) == (1, 1)
        await proxy.post("/v1/rollout/pause", {})
        held = await numbers(proxy)
        assert (held["hoofprint_gate_waiting"], held["hoofprint_preemptions_total"]) == (1, 1)
        first, other = (engine, second_engine) if engine.bodies else (second_engine, engine)
        proxy.parts.registry.engines[0 if first is engine else 1].in_rotation = False
        engine.go.set()
        second_engine.go.set()
        await proxy.post("/v1/rollout/resume", {})
        status, reply = await call
        assert (status, len(reply["output_ids"])) == (200, 6)
        after = await numbers(proxy)
    assert other.bodies
    assert (after["hoofprint_resumes_total"], after["hoofprint_engine_switches_total"]) == (1, 1)
    assert (after["hoofprint_gate_waiting"], after["hoofprint_inflight"]) == (0, 0)
