"""What the proxy keeps: bytes per recorded token of open sessions, and of ended ones."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from benchmarks.proxy.stage import Client, Stage, at_once, client_of
from benchmarks.proxy.turns import Api, Talker

SESSIONS = 256
TURNS = 20
REPLY = 256


class Kept(NamedTuple):
    """KB per 1,000 recorded tokens: of open sessions, and of as many that have ended."""

    open_kb: float
    ended_kb: float


async def measure(stage: Stage, api: Api) -> Kept:
    """Ended sessions are compared with a proxy that has had as many before: what it needs once is not what it keeps."""
    async with client_of(stage) as client:
        await _end(await _talk(client, api, f"{api}-memory-0"))
        base = await _settled(stage)
        talkers = await _talk(client, api, f"{api}-memory-1")
        held = await _settled(stage)
        await _end(talkers)
        for number in (2, 3):
            await _end(await _talk(client, api, f"{api}-memory-{number}"))
        ended = await _settled(stage)
    tokens = sum(talker.tokens for talker in talkers)
    return Kept((held - base) / tokens, max(0.0, ended - base) / (3 * tokens))


async def _talk(client: Client, api: Api, name: str) -> list[Talker]:
    talkers = [Talker(client, await client.open(f"{name}-{i}"), api, REPLY) for i in range(SESSIONS)]
    for _ in range(TURNS):
        await at_once(SESSIONS, lambda i: talkers[i].turn())
    return talkers


async def _end(talkers: list[Talker]) -> None:
    await at_once(len(talkers), lambda i: talkers[i].end())


async def _settled(stage: Stage) -> int:
    await asyncio.sleep(1.0)
    return stage.memory()
