"""SGLang's own router (from PyPI) beside ours: it forwards and balances, and records nothing. A floor for what a proxy costs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.data_plane.peers.environment import python_of
from benchmarks.proxy.stage import PATIENCE_S, Stage, answers, at_once, client_of, cpu_of, free_port

REQUIREMENTS = Path(__file__).with_name("router.requirements.txt")
AT_ONCE = 32


class Router:
    """A router that runs. `url`: its address."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self._pid = pid

    async def cost(self, stage: Stage, tokens: int, *, stream: bool, rounds: int = 4) -> float:
        """CPU-ms of its process per request, 32 at once."""
        async with client_of(stage) as client:
            before = 0.0
            for number in range(-1, rounds):
                if number == 0:
                    before = cpu_of(self._pid)

                async def one(i: int, number: int = number) -> None:
                    sampling: dict[str, Any] = {"max_new_tokens": tokens}
                    body = {
                        "rid": f"router-{tokens}-{stream}-{number}-{i}", "input_ids": stage.tokens[:64],
                        "sampling_params": sampling, "stream": stream, "return_logprob": True,
                    }  # fmt: skip
                    async for _ in client.frames(self.url + "/generate", body):
                        pass

                await at_once(AT_ONCE, one)
            return (cpu_of(self._pid) - before) / (rounds * AT_ONCE) * 1000


@contextmanager
def running_router(stage: Stage, log: Path) -> Iterator[Router | str]:
    """It, or why there is none."""
    try:
        python = python_of(REQUIREMENTS)
    except (subprocess.CalledProcessError, FileNotFoundError) as refused:
        yield f"sglang-router could not be installed: {refused}"
        return
    port, metrics = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(python), "-m", "sglang_router.launch_router", "--worker-urls", stage.engine, "--host", "127.0.0.1", "--port",
        str(port), "--prometheus-port", str(metrics), "--policy", "round_robin", "--log-level", "warn",
    ]  # fmt: skip
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(url + "/health") and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        yield Router(url, child.pid) if answers(url + "/health") else "sglang-router did not come up"
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
