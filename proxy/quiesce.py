"""Bring running generations to a stand: abort their engine calls until none is left or the time is over.

Aborts are repeated, because one that overtook its request on the way to the engine found nothing. Invariant: it ends in
time even where an engine does not answer an abort, which does not hold up the aborts at others; what is left is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.generation import Generation
from proxy.generation_control import GenerationController

_ROUND_S = 0.05

Running = dict[str, Generation]
Selects = Callable[[Generation], bool]


def everything(_generation: Generation) -> bool:
    """Select all."""
    return True


async def quiesce(
    controller: GenerationController, timeout_s: float, selects: Selects = everything, *, abort: bool = True
) -> Running:
    """Engine calls of the selected generations that still run after at most `timeout_s`, by id. Without `abort` they may
    end by themselves."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    aborts: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            running = {rid: g for rid, g in controller.running.items() if selects(g)}
            left_s = deadline - loop.time()
            if not running or left_s <= 0:
                return running
            if abort:
                aborts = _abort_again(aborts, running)
                await asyncio.wait(aborts.values(), timeout=min(_ROUND_S, left_s))
            await controller.wait_quiet(min(_ROUND_S, max(0.0, deadline - loop.time())))
    finally:
        for task in aborts.values():
            task.cancel()


def _abort_again(aborts: dict[str, asyncio.Task[None]], running: Running) -> dict[str, asyncio.Task[None]]:
    """The aborts under way, and a new one for each call that has none."""
    under_way = {rid: task for rid, task in aborts.items() if not task.done()}
    missing = {rid: g for rid, g in running.items() if rid not in under_way and g.engine is not None}
    return under_way | {rid: asyncio.ensure_future(_abort(g, rid)) for rid, g in missing.items()}


async def _abort(generation: Generation, rid: str) -> None:
    if generation.engine is not None:
        await generation.engine.abort(rid)
