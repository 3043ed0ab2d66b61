"""When a stream is looked at: at once for the first token and at the end, else about once a frame's time."""

from __future__ import annotations

import asyncio

import pytest

from proxy.streaming import Beat, Pace

FRAME_S = 1000.0
SILENCE_S = 3600.0


async def looks_now(beat: Beat) -> bool:
    """Whether the next look is due already."""
    look = asyncio.ensure_future(beat.next())
    for _ in range(3):
        await asyncio.sleep(0)
    due = look.done()
    look.cancel()
    await asyncio.gather(look, return_exceptions=True)
    return due


@pytest.mark.parametrize(
    ("ago_s", "due"), [(None, True), (0.0, False), (0.5 * FRAME_S, False), (0.8 * FRAME_S, True)]
)
async def test_news_waits_for_most_of_a_frame_behind_the_last_look(ago_s: float | None, due: bool) -> None:
    beat = Beat(Pace(FRAME_S, SILENCE_S))
    if ago_s is not None:
        beat._looked = asyncio.get_running_loop().time() - ago_s
    beat.news()
    assert await looks_now(beat) == due


async def test_silence_is_no_news_and_the_end_is_told_at_once() -> None:
    beat = Beat(Pace(FRAME_S, SILENCE_S))
    assert not await looks_now(beat)
    beat._looked = asyncio.get_running_loop().time()
    beat.news()
    beat.end()
    assert await looks_now(beat)
