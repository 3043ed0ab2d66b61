"""What the proxy adds to a request, one at a time, against the engine called directly and against another proxy."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.proxy.stage import Client, Stage, client_of

TOKENS = 16
_LOG = re.compile(r"^hoofprint_log_seconds_(sum|count) (\S+)$", re.MULTILINE)


class Added(NamedTuple):
    """Milliseconds at the median over the direct call's: with the log's acknowledgement, and without."""

    with_log: float
    without: float
    direct: float
    peer: float | None


async def measure(stage: Stage, peer: str | None, rounds: int = 300) -> Added:
    """The three take turns, so that whoever else uses the cores disturbs all of them."""
    async with client_of(stage) as client:
        base = await client.open("latency")
        direct: list[float] = []
        ours: list[float] = []
        other: list[float] = []
        for number in range(-20, rounds):
            if number == 0:
                before = await _log_seconds(client)
                direct, ours, other = [], [], []
            engine = {**_body(client, number), "rid": f"direct-{number}", "return_logprob": True}
            direct.append(await _ms(client, stage.engine + "/generate", {**engine, "stream": True}))
            ours.append(await _ms(client, base + "/generate", _body(client, number)))
            if peer is not None:
                engine["rid"] = f"peer-{number}"
                other.append(await _ms(client, peer + "/generate", {**engine, "stream": True}))
        after = await _log_seconds(client)
    log_ms = (after["sum"] - before["sum"]) / (after["count"] - before["count"]) * 1000
    floor = statistics.median(direct)
    added = statistics.median(ours) - floor
    return Added(added, added - log_ms, floor, statistics.median(other) - floor if other else None)


def _body(client: Client, number: int) -> dict[str, Any]:
    # no two alike: a session that gets the same request again branches
    ids = [number + 100, *client.stage.tokens[:63]]
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": TOKENS}}


async def _ms(client: Client, url: str, body: dict[str, Any]) -> float:
    began = time.perf_counter()
    async for _ in client.frames(url, body):
        pass
    return (time.perf_counter() - began) * 1000


async def _log_seconds(client: Client) -> dict[str, float]:
    async with client.http.get(client.stage.proxy + "/metrics") as reply:
        return {key: float(value) for key, value in _LOG.findall(await reply.text())}
