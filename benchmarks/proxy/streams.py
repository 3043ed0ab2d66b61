"""Streams: how far the first token lags behind the engine's, and what a streamed reply costs."""

from __future__ import annotations

import re
import statistics
import uuid
from typing import NamedTuple

from benchmarks.proxy.stage import Client, Stage, at_once, client_of
from benchmarks.proxy.turns import Api

AT_ONCE = 32
ROUNDS = 4
TOKENS = 256


class StreamCost(NamedTuple):
    """`lag_ms`: the median over the engine's first token, one stream at a time; `cpu_ms`: the proxy's, per request."""

    lag_ms: float
    cpu_ms: float


async def measure(stage: Stage, api: Api) -> StreamCost:
    """First one at a time, then 32 at once."""
    async with client_of(stage) as client:
        await _stream(client, api, await _opened(client), TOKENS)
        await client.post(stage.engine + "/clock", {})
        lags = [await _lag(client, api) for _ in range(20)]
        spent = 0.0
        for _ in range(ROUNDS):
            bases = [await _opened(client) for _ in range(AT_ONCE)]
            before = stage.cpu()
            await at_once(AT_ONCE, lambda i: _stream(client, api, bases[i], TOKENS))  # noqa: B023 - awaited here
            spent += stage.cpu() - before
            await at_once(AT_ONCE, lambda i: client.close(bases[i]))  # noqa: B023
    return StreamCost(statistics.median(lags), spent / (ROUNDS * AT_ONCE) * 1000)


async def _opened(client: Client) -> str:
    return await client.open(uuid.uuid4().hex)


async def _lag(client: Client, api: Api) -> float:
    base = await _opened(client)
    seen = await _stream(client, api, base, 32)
    (first,) = (await client.post(client.stage.engine + "/clock", {})).values()
    await client.close(base)
    return (seen - float(first)) * 1000


async def _stream(client: Client, api: Api, base: str, tokens: int) -> float:
    """When its first token came."""
    if api == "native":
        url, mark = base + "/generate", re.compile(rb"output_ids")
        sampling = {"max_new_tokens": tokens}
        body = {"input_ids": client.stage.tokens[:64], "sampling_params": sampling, "stream": True}
    else:
        url, mark = base + "/v1/chat/completions", re.compile(rb'"content":"[^"]')
        body = {
            "model": "policy", "messages": [{"role": "user", "content": "What is a log?"}], "max_tokens": tokens,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
    first = 0.0
    async for at, piece in client.frames(url, body):
        if not first and mark.search(piece):
            first = at
    return first
