"""Watching a generation from its client's side: something new, or nothing for so long that a keep-alive is due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from proxy.generation import Generation


async def watch_generation(
    generation: Generation, work: asyncio.Future[None], keepalive_s: float
) -> AsyncGenerator[bool, None]:
    """True: there may be new tokens; False: keep alive. Ends when the work has; raises its error. Leaving early cancels it."""
    news = asyncio.Event()
    generation.wake = news.set
    work.add_done_callback(lambda _: news.set())
    try:
        while not work.done():
            try:
                await asyncio.wait_for(news.wait(), keepalive_s)
            except TimeoutError:
                yield False
                continue
            news.clear()
            if not work.done():
                yield True
        await work
    finally:
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
