"""`hoofprint demo`: start the run, watch it, end it, report, check. Exit status 0 only if every check held.

The display follows the log while the run goes; the checks read the archive when it is over, so that they also prove it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from journal.event_log import EventFollower
from schemas.errors import InvariantBroken
from schemas.settings import Settings, load
from schemas.topics import BATCHES, CONTROL, VERDICTS
from stack.demo.aftermath import aftermath
from stack.demo.facts import RunFacts
from stack.demo.presets import Demo, demo_named
from stack.demo.progress import Display
from stack.sglang.environment import ensure_environment
from stack.up import Stack, running

STOPPED = 130
_FOLLOW_S = 0.3


async def run_demo(
    task: str,
    engine: str,
    steps: int | None,
    config: Path | None,
    sets: tuple[str, ...],
    on_stop: Callable[[asyncio.Event], None],
) -> int:
    """Exit status: 0, 1 when a check failed, STOPPED when the event that `on_stop` was given was set."""
    demo = demo_named(task, engine)
    console = Console()
    console.print(f"preparing the {demo.name} demo", highlight=False)
    if engine == "sglang":
        await asyncio.to_thread(ensure_environment)
    run_id = f"{demo.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    settings = load(config, sets, await asyncio.to_thread(demo.base, run_id, steps))
    asked = asyncio.Event()
    on_stop(asked)
    facts = RunFacts(settings.run.run_id)
    with Display(facts, settings.trainer.steps, console) as display:
        if not await _train(settings, demo, facts, display, asked):
            return STOPPED
    return aftermath(settings, demo, console)


async def _train(
    settings: Settings, demo: Demo, facts: RunFacts, display: Display, asked: asyncio.Event
) -> bool:
    """Whether it came to its end; all processes are stopped in any case. PartFailed, InvariantBroken, TransportError."""
    async with running(settings, display.say) as stack:
        display.say(f"the run is in {stack.directory}; agents go to {stack.proxy_url}/v1")
        watching = asyncio.create_task(_watch(stack, demo, facts, display))
        trained = asyncio.create_task(stack.trained())
        stopped = asyncio.create_task(asked.wait())
        tasks = (watching, trained, stopped)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                display.say("stopping")
                return False
            if watching.done():
                watching.result()
            trained.result()
            await stack.end("trained")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return True


async def _watch(stack: Stack, demo: Demo, facts: RunFacts, display: Display) -> None:
    """Follow the log into the display. InvariantBroken when no step comes for too long."""
    follower = await asyncio.to_thread(EventFollower, stack.settings.kafka, [CONTROL, VERDICTS, BATCHES])
    steps, last_step_at = 0, time.monotonic()
    try:
        while True:
            for record, event in await asyncio.to_thread(follower.poll, _FOLLOW_S):
                facts.fold(record.offset, event)
            display.update()
            if len(facts.steps) > steps:
                steps, last_step_at = len(facts.steps), time.monotonic()
            elif time.monotonic() - last_step_at > demo.stall_s:
                raise InvariantBroken(
                    f"no optimizer step for {demo.stall_s:.0f} s; the processes' logs are in {stack.directory / 'logs'}",
                    steps=steps,
                )
    finally:
        follower.close()
