"""What the proxy adds to a request, one at a time, against the engine called directly and against another proxy."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.proxy.stage import Client, Stage, client_of

TOKENS = 16
A_SESSION = 10
"""Requests of one session; each begins a lineage of its own there."""
_LOG = re.compile(r"^hoofprint_log_seconds_sum (\S+)$", re.MULTILINE)


class Added(NamedTuple):
    """Milliseconds at the median over the direct call's: with the log's acknowledgement, and without."""

    with_log: float
    without: float
    direct: float
    peer: float | None


async def measure(stage: Stage, peer: str | None, rounds: int = 300) -> Added:
    """The three take turns, so that whoever else uses the cores disturbs all of them."""
    direct: list[float] = []
    ours: list[float] = []
    unlogged: list[float] = []
    other: list[float] = []
    async with client_of(stage) as client:
        base = ""
        for number in range(-2 * A_SESSION, rounds):
            if number == 0:
                direct, ours, unlogged, other = [], [], [], []
            if number % A_SESSION == 0:
                base = await client.open(f"latency{number}")
            engine = {**_body(client, number), "return_logprob": True, "stream": True}
            direct.append(await _ms(client, stage.engine + "/generate", {**engine, "rid": f"direct{number}"}))
            before = await _log_ms(client)
            ours.append(await _ms(client, base + "/generate", _body(client, number)))
            unlogged.append(ours[-1] - (await _log_ms(client) - before))
            if peer is not None:
                other.append(await _ms(client, peer + "/generate", {**engine, "rid": f"peer{number}"}))
    floor = statistics.median(direct)
    added = statistics.median(other) - floor if other else None
    return Added(statistics.median(ours) - floor, statistics.median(unlogged) - floor, floor, added)


def _body(client: Client, number: int) -> dict[str, Any]:
    # no two alike: a session that gets the same request again branches
    ids = [number + 100, *client.stage.tokens[:63]]
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": TOKENS}}


async def _ms(client: Client, url: str, body: dict[str, Any]) -> float:
    began = time.perf_counter()
    async for _ in client.frames(url, body):
        pass
    return (time.perf_counter() - began) * 1000


async def _log_ms(client: Client) -> float:
    """What the proxy has waited for acknowledgements so far."""
    async with client.http.get(client.stage.proxy + "/metrics") as reply:
        (found,) = _LOG.findall(await reply.text())
    return float(found) * 1000
