"""The processes of the TransferQueue peer: controller and two storage units in Ray, a writer, a reader that packs steps of 256.

`measure STATE TOKENS COUNT` prints a line of figures and a line of trained trajectories, and waits to be killed; `after STATE`
prints what can be trained when it starts from the checkpoint; `write …` is the stream's writer, a round per line of stdin.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

GROUP, STEP, AT_ONCE = 8, 256, 64
FIELDS = ["ids", "logprobs", "versions", "mask", "number"]


def columns(tokens: int, start: int, count: int) -> TensorDict:
    """Trajectories `start` and after."""
    return TensorDict(
        {
            "ids": torch.randint(0, 150_000, (count, tokens), dtype=torch.int32),
            "logprobs": -torch.rand(count, tokens),
            "versions": torch.zeros(count, tokens, dtype=torch.int32),
            "mask": torch.ones(count, tokens, dtype=torch.uint8),
            "number": torch.arange(start, start + count, dtype=torch.int64)[:, None],
        },
        batch_size=count,
    )


def begin() -> None:
    """Ray and the queue."""
    torch.set_num_threads(1)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="bench",
    )
    tq.init(
        {"controller": {"sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=GROUP), "polling_mode": True}}
    )


def put_groups(tokens: int, count: int, partition: str) -> None:
    """A group of 8 at a time, as its generation returns it."""
    client = tq.get_client()
    for start in range(0, count, GROUP):
        client.put(columns(tokens, start, GROUP), partition_id=partition)


def put_by_sessions(tokens: int, count: int, partition: str) -> None:
    """64 sessions, each waits for every one of its own."""
    rows = iter([columns(tokens, number, 1) for number in range(count)])

    async def session(index: int) -> None:
        for number, row in enumerate(rows):
            await tq.async_kv_put(f"{index}-{number}-{id(row)}", partition, row)

    async def sessions() -> None:
        await asyncio.gather(*(session(index) for index in range(AT_ONCE)))

    client = tq.get_client()
    client._run_coroutine(sessions())  # noqa: SLF001 — its sockets belong to its own loop


def take(count: int, partition: str, patience_s: float = 60) -> list[int]:
    """Steps of 256, each packed; the trajectories' numbers."""
    client = tq.get_client()
    numbers: list[int] = []
    deadline = time.monotonic() + patience_s
    while len(numbers) < count and time.monotonic() < deadline:
        meta = client.get_meta(FIELDS, STEP, partition, task_name="train")
        if meta.size == 0:
            time.sleep(0.002)
            continue
        data = client.get_data(meta)
        for name in FIELDS[:4]:
            torch.cat([row.flatten() for row in data[name].unbind(0)])
        numbers += [int(row.flatten()[0]) for row in data["number"].unbind(0)]
    return numbers


def cpu_ms(count: int, work: Callable[..., None], *arguments: Any) -> float:
    """Process CPU per trajectory."""
    began = time.process_time()
    work(*arguments)
    return (time.process_time() - began) / count * 1000


class Writer:
    """The producing process, connected once: that takes longer than a round."""

    def __init__(self, tokens: int, count: int) -> None:
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, __file__, "write", address, str(tokens), str(count)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        while self._child.stdout.readline().strip() != "ready":
            pass

    def go(self, partition: str) -> None:
        """Write a round."""
        assert self._child.stdin is not None
        self._child.stdin.write(partition + "\n")
        self._child.stdin.flush()

    def close(self) -> None:
        """End it."""
        self._child.communicate()


def stream(writer: Writer, count: int, partition: str) -> float:
    """Trajectories a second from the first put to the last packed step."""
    began = time.perf_counter()
    writer.go(partition)
    numbers = take(count, partition)
    wall = time.perf_counter() - began
    assert len(set(numbers)) == count
    tq.get_client().clear_partition(partition)
    return count / wall


def write(address: str, tokens: int, count: int) -> None:
    """A round per line."""
    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="bench")
    tq.init()
    print("ready", flush=True)
    for line in sys.stdin:
        put_groups(tokens, count, line.strip())


def measure(state: str, tokens: int, count: int) -> None:
    """All figures but those of the crash; then a checkpoint, 256 of its 256 trained, and 512 more acknowledged."""
    begin()
    client = tq.get_client()
    put_groups(tokens, 256, "warm")
    take(256, "warm")
    client.clear_partition("warm")
    result: dict[str, float] = {"bulk_put_ms": cpu_ms(count, put_groups, tokens, count, "bulk")}
    client.clear_partition("bulk")
    result["put_ms"] = cpu_ms(count // 4, put_by_sessions, tokens, count // 4, "sessions")
    client.clear_partition("sessions")
    writer = Writer(tokens, count)
    result["rate"] = max(stream(writer, count, f"stream{number}") for number in range(2))
    writer.close()
    print(json.dumps(result), flush=True)
    put_groups(tokens, 256, "crash")
    tq.save_checkpoint(state)
    trained = take(256, "crash")
    for start in range(256, 768, GROUP):
        client.put(columns(tokens, start, GROUP), partition_id="crash")
    print(json.dumps(trained), flush=True)
    time.sleep(600)


def after_the_kill(state: str) -> None:
    """Says what can be trained."""
    begin()
    tq.load_checkpoint(state)
    print(json.dumps(take(768, "crash", patience_s=4)), flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "measure":
        measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        after_the_kill(sys.argv[2])
