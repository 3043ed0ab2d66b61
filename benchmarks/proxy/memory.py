"""What the proxy keeps: bytes per recorded token of open sessions, and of ended ones."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from benchmarks.proxy.stage import Client, Stage, at_once, client_of
from benchmarks.proxy.turns import Api, Talker

SESSIONS = 128
AT_ONCE = 4
WAVES = 3
TURNS = 20
REPLY = 256


class Kept(NamedTuple):
    """KB per 1,000 recorded tokens: what open sessions hold, and what ended ones leave behind."""

    open_kb: float
    ended_kb: float


async def measure(stage: Stage, api: Api) -> Kept:
    """Bytes that the process alone has, with all sessions open, and after as many times as many that ended. Few requests are in
    flight at a time, and as many whole sessions have gone before, so that the heap that requests need is there already."""
    async with client_of(stage) as client:
        await _end(await _talk(client, api, "warm", AT_ONCE))
        empty = await _settled(stage)
        talkers = await _talk(client, api, "open", SESSIONS)
        tokens = sum(talker.tokens for talker in talkers)
        opened = await _settled(stage)
        await _end(talkers)
        before = await _settled(stage)
        for number in range(WAVES):
            await _end(await _talk(client, api, f"ended-{number}", SESSIONS))
        ended = await _settled(stage)
    return Kept((opened - empty) / tokens, max(0.0, ended - before) / (WAVES * tokens))


async def _talk(client: Client, api: Api, name: str, count: int) -> list[Talker]:
    talkers = [Talker(client, await client.open(f"{api}-{name}-{i}"), api, REPLY) for i in range(count)]
    for _ in range(TURNS):
        for first in range(0, count, AT_ONCE):
            some = talkers[first : first + AT_ONCE]
            await at_once(len(some), lambda i: some[i].turn())  # noqa: B023 - awaited here
    return talkers


async def _end(talkers: list[Talker]) -> None:
    await at_once(len(talkers), lambda i: talkers[i].end())


async def _settled(stage: Stage) -> int:
    await asyncio.sleep(1.0)
    return stage.memory()
