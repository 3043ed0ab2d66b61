"""Pauses: 64 requests preempted and resumed again and again; no token lost or twice, and what each pause costs."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import NamedTuple

from benchmarks.proxy.stage import Client, Stage, client_of

REQUESTS = 64
PAUSES = 8
TOKENS = 2_000
FIRST = 64


class PauseCost(NamedTuple):
    """Tokens lost and twice over all requests; seconds until all run again; CPU-ms of the proxy per pause and resume."""

    lost: int
    twice: int
    again_s: float
    cpu_ms: float
    preemptions: int


async def measure(stage: Stage) -> PauseCost:
    """The requests take longer than the pauses; what runs without a pause is measured beside it and taken off."""
    async with client_of(stage) as client:
        bases = [await client.open(f"pause-{i}") for i in range(REQUESTS)]
        requests = [asyncio.ensure_future(_whole(client, base)) for base in bases]
        await _running(client, REQUESTS)
        idle = stage.cpu()
        await asyncio.sleep(1.0)
        idle = stage.cpu() - idle
        again: list[float] = []
        seconds: list[float] = []
        for _ in range(PAUSES):
            before, began = stage.cpu(), time.perf_counter()
            await client.post(stage.proxy + "/v1/rollout/pause", {})
            resumed = time.perf_counter()
            await client.post(stage.proxy + "/v1/rollout/resume", {})
            await _running(client, REQUESTS)
            again.append(time.perf_counter() - resumed)
            await asyncio.sleep(0.2)
            seconds.append(stage.cpu() - before - idle * (time.perf_counter() - began))
        replies = await asyncio.gather(*requests)
    wrong = [_compare(client, ids) for ids, _ in replies]
    return PauseCost(
        sum(lost for lost, _ in wrong), sum(twice for _, twice in wrong), statistics.median(again),
        statistics.median(seconds) * 1000, sum(count for _, count in replies),
    )  # fmt: skip


async def _running(client: Client, count: int) -> None:
    while (await client.post(client.stage.engine + "/running", {}))["running"] != count:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.002)


async def _whole(client: Client, base: str) -> tuple[list[int], int]:
    body = {"input_ids": client.stage.tokens[:FIRST], "sampling_params": {"max_new_tokens": TOKENS}}
    reply = await client.post(base + "/generate", body)
    return reply["output_ids"], reply["meta_info"]["hoofprint"]["preemptions"]


def _compare(client: Client, ids: list[int]) -> tuple[int, int]:
    """Tokens that are missing and that came again: token `p` of a context is number `p` of the list."""
    tokens = client.stage.tokens
    wanted = [tokens[p % len(tokens)] for p in range(FIRST, FIRST + TOKENS)]
    if ids == wanted:
        return 0, 0
    shift = len(ids) - TOKENS
    differing = sum(a != b for a, b in zip(ids, wanted, strict=False))
    return max(0, -shift) or differing, max(0, shift)
