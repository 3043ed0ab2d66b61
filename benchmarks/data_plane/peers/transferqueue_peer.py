"""The workload through TransferQueue: controller and two storage units in Ray, a writer, a reader that packs steps of 256."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import psutil
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


def stream(tokens: int, count: int, partition: str) -> float:
    """Trajectories a second from the first put to the last packed step."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, __file__, "write", address, str(tokens), str(count), partition]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdin is not None
    assert writer.stdout is not None
    while writer.stdout.readline().strip() != "ready":
        pass
    began = time.perf_counter()
    writer.stdin.write("go\n")
    writer.stdin.flush()
    numbers = take(count, partition)
    wall = time.perf_counter() - began
    assert len(set(numbers)) == count
    writer.wait()
    tq.get_client().clear_partition(partition)
    return count / wall


def crash(tokens: int) -> tuple[int, int]:
    """A checkpoint, 256 of its 256 trained, 512 more acknowledged, kill -9 of everything, start from the checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        state = directory + "/state"
        before = subprocess.Popen(
            [sys.executable, __file__, "before", state, str(tokens)], stdout=subprocess.PIPE, text=True
        )
        trained = set(_numbers(before))
        for process in [*psutil.Process(before.pid).children(recursive=True), psutil.Process(before.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        before.wait()
        after = subprocess.Popen(
            [sys.executable, __file__, "after", state], stdout=subprocess.PIPE, text=True
        )
        again = set(_numbers(after))
        after.wait()
    return 512 - len(again - trained), len(again & trained)


def _numbers(child: subprocess.Popen[str]) -> list[int]:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("["):
            return list(json.loads(line))
    raise RuntimeError("the child ended without a word")


def before_the_kill(state: str, tokens: int) -> None:
    """Says what was trained, then waits for its end."""
    begin()
    put_groups(tokens, 256, "crash")
    tq.save_checkpoint(state)
    trained = take(256, "crash")
    for start in range(256, 768, GROUP):
        tq.get_client().put(columns(tokens, start, GROUP), partition_id="crash")
    print(json.dumps(trained), flush=True)
    time.sleep(60)


def after_the_kill(state: str) -> None:
    """Says what can be trained."""
    begin()
    tq.load_checkpoint(state)
    print(json.dumps(take(768, "crash", patience_s=4)), flush=True)
    tq.close()
    ray.shutdown()


def main(tokens: int, count: int) -> None:
    """All figures."""
    begin()
    put_groups(tokens, 256, "warm")
    take(256, "warm")
    tq.get_client().clear_partition("warm")
    result: dict[str, float] = {"bulk_put_ms": cpu_ms(count, put_groups, tokens, count, "bulk")}
    tq.get_client().clear_partition("bulk")
    result["put_ms"] = cpu_ms(count // 4, put_by_sessions, tokens, count // 4, "sessions")
    tq.get_client().clear_partition("sessions")
    result["rate"] = max(stream(tokens, count, f"stream{i}") for i in range(2))
    tq.close()
    ray.shutdown()
    result["lost"], result["twice"] = crash(tokens)
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        torch.set_num_threads(1)
        ray.init(address=sys.argv[2], log_to_driver=False, logging_level=logging.ERROR, namespace="bench")
        tq.init()
        print("ready", flush=True)
        sys.stdin.readline()
        put_groups(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    elif sys.argv[1] == "before":
        before_the_kill(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "after":
        after_the_kill(sys.argv[2])
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
