"""What the proxy keeps: bytes per recorded token of open sessions, and of ended ones."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from benchmarks.proxy.stage import Client, Stage, at_once, client_of
from benchmarks.proxy.turns import Api, Talker

SESSIONS = 128
WAVES = 3
TURNS = 20
REPLY = 256


class Kept(NamedTuple):
    """KB per 1,000 recorded tokens. Of open sessions: what a proxy grows by that has had as many before, so that it fills freed
    heap first, and what a fresh one grows by, the peak of what was in flight included. What is kept lies between. Of ended ones:
    what it grows by with three times as many."""

    at_least_kb: float
    at_most_kb: float
    ended_kb: float


async def measure(stage: Stage, api: Api) -> Kept:
    """Bytes that the process alone has, after each wave of sessions."""
    async with client_of(stage) as client:
        await _end(await _talk(client, api, f"{api}-warm", turns=1))
        fresh = await _settled(stage)
        talkers = await _talk(client, api, f"{api}-first")
        first = await _settled(stage)
        tokens = sum(talker.tokens for talker in talkers)
        await _end(talkers)
        empty = await _settled(stage)
        talkers = await _talk(client, api, f"{api}-second")
        second = await _settled(stage)
        await _end(talkers)
        before = await _settled(stage)
        for number in range(WAVES):
            await _end(await _talk(client, api, f"{api}-{number}"))
        ended = await _settled(stage)
    growth = ended - before
    return Kept(
        max(0.0, second - empty) / tokens, (first - fresh) / tokens, max(0.0, growth) / (WAVES * tokens)
    )


async def _talk(client: Client, api: Api, name: str, turns: int = TURNS) -> list[Talker]:
    talkers = [Talker(client, await client.open(f"{name}-{i}"), api, REPLY) for i in range(SESSIONS)]
    for _ in range(turns):
        await at_once(SESSIONS, lambda i: talkers[i].turn())
    return talkers


async def _end(talkers: list[Talker]) -> None:
    await at_once(len(talkers), lambda i: talkers[i].end())


async def _settled(stage: Stage) -> int:
    await asyncio.sleep(1.0)
    return stage.memory()
