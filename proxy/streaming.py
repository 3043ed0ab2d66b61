"""Watching a generation from its client's side: something new, or nothing for so long that a keep-alive is due.

The first token is shown the moment it comes. After that a stream is looked at once per frame's time, however many tokens came
meanwhile: an engine tells hundreds a second, and each look costs a parse, a rendering and a system call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, NamedTuple

from proxy.generation import Generation

_NEARLY: Final = 0.75
"""Of a frame's time. Engines are asked for one event a frame; one that comes a little early shall not wait, and wake us twice."""


class Pace(NamedTuple):
    """Seconds: the time between two frames, about, and the silence after which a keep-alive is due."""

    frame_s: float
    keepalive_s: float


class Beat:
    """When to look: `next` is True for news and False for a long silence."""

    def __init__(self, pace: Pace) -> None:
        self._loop = asyncio.get_running_loop()
        self._pace = pace
        self._looked = -pace.frame_s
        self._news = self._ended = False
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def news(self) -> None:
        """Something came."""
        if not self._news:
            self._news = True
            self._plan()

    def end(self) -> None:
        """Nothing more will come: look now."""
        self._ended = True
        self._plan()

    async def next(self) -> bool:
        """Wait. Only one at a time may."""
        self._waiter = self._loop.create_future()
        self._plan()
        try:
            return await self._waiter
        finally:
            self._waiter = None
            self._cancel()

    def _plan(self) -> None:
        """Wake the waiter now or later, by what is known."""
        if self._waiter is None or self._waiter.done():
            return
        self._cancel()
        now = self._loop.time()
        due = self._looked + _NEARLY * self._pace.frame_s if self._news else now + self._pace.keepalive_s
        if self._ended or due <= now:
            self._wake()
        else:
            self._timer = self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            found, self._news = self._news or self._ended, False
            if found:
                self._looked = self._loop.time()
            self._waiter.set_result(found)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def watch_generation(
    generation: Generation, work: asyncio.Future[None], pace: Pace
) -> AsyncGenerator[bool, None]:
    """True: there may be new tokens; False: keep alive. Ends when the work has; raises its error. Leaving early cancels it."""
    beat = Beat(pace)
    generation.wake = beat.news
    work.add_done_callback(lambda _: beat.end())
    try:
        while not work.done():
            news = await beat.next()
            if not work.done():
                if news:
                    generation.look()
                yield news
        await work
    finally:
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
