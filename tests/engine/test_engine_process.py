"""The engine as a process: a clean end, a dead end, and one sentence when it cannot start."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest
from engine_client import Client

from schemas.errors import EngineUnavailable
from stack.engine.launch import EngineProcess

pytestmark = pytest.mark.engine


async def test_sigterm_ends_it_with_code_0_even_while_it_generates(dial: Path) -> None:
    process = EngineProcess(dial, min_step_ms=50)
    process.start()
    try:
        async with Client(process.base_url) as client:
            task = asyncio.create_task(client.generate([1], max_new_tokens=400))
            await client.until_load(lambda load: load["num_running_reqs"] == 1)
            code = await asyncio.to_thread(process.stop, 5.0)
            assert code == 0
            with pytest.raises((aiohttp.ClientError, AssertionError)):
                await task
    finally:
        process.kill()


def test_a_killed_engine_comes_up_again_on_its_port(dial: Path) -> None:
    process = EngineProcess(dial)
    first = process.start()
    pid = process.pid
    process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.start() == first
    assert process.stop() == 0


def test_a_checkpoint_that_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"exit code 2\): error: cannot read .*config\.json"):
        EngineProcess(tmp_path).start()
