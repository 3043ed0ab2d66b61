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
    """KB per 1,000 recorded tokens: of open sessions, and of as many that have ended."""

    open_kb: float
    ended_kb: float


async def measure(stage: Stage, api: Api) -> Kept:
    """Open sessions against a warm proxy with none; ended ones against one that has had as many before, because a heap that
    grew once does not shrink."""
    async with client_of(stage) as client:
        await _end(await _talk(client, api, f"{api}-memory-warm", SESSIONS, turns=1))  # as many connections
        empty = await _settled(stage)
        talkers = await _talk(client, api, f"{api}-memory-0", SESSIONS)
        held = await _settled(stage) - empty
        tokens = sum(talker.tokens for talker in talkers)
        await _end(talkers)
        await _end(await _talk(client, api, f"{api}-memory-1", SESSIONS))
        before = await _settled(stage)
        for number in range(2, 2 + WAVES):
            await _end(await _talk(client, api, f"{api}-memory-{number}", SESSIONS))
        grown = await _settled(stage) - before
    return Kept(held / tokens, max(0.0, grown) / (WAVES * tokens))


async def _talk(client: Client, api: Api, name: str, count: int, turns: int = TURNS) -> list[Talker]:
    talkers = [Talker(client, await client.open(f"{name}-{i}"), api, REPLY) for i in range(count)]
    for _ in range(turns):
        await at_once(count, lambda i: talkers[i].turn())
    return talkers


async def _end(talkers: list[Talker]) -> None:
    await at_once(len(talkers), lambda i: talkers[i].end())


async def _settled(stage: Stage) -> int:
    await asyncio.sleep(1.0)
    return stage.memory()
