"""The workload through dm-reverb: one server, one writer, one reader that packs a step of 256 trajectories."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import reverb

GROUP, STEP, AT_ONCE = 8, 256, 64


def columns(tokens: int) -> dict[str, Any]:
    """One trajectory."""
    random = np.random.default_rng(0)
    return {
        "ids": random.integers(0, 150_000, tokens, np.int32),
        "logprobs": -random.random(tokens, np.float32),
        "versions": np.zeros(tokens, np.int32),
        "mask": np.ones(tokens, np.uint8),
        "number": np.int64(0),
    }


def serve(port: int, directory: str) -> None:
    """The server process: a queue whose items are given out once."""
    table = reverb.Table.queue("train", max_size=1_000_000)
    server = reverb.Server(
        [table], port=port, checkpointer=reverb.checkpointers.DefaultCheckpointer(directory)
    )
    print("ready", flush=True)
    server.wait()


def start_server(port: int, directory: str) -> subprocess.Popen[str]:
    """And wait until it serves."""
    command = [sys.executable, __file__, "serve", str(port), directory]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "ready"
    return child


def put(port: int, tokens: int, start: int, count: int, per_flush: int) -> None:
    """One writer; `flush` returns when the server has the items."""
    data = columns(tokens)
    with reverb.Client(f"localhost:{port}").trajectory_writer(num_keep_alive_refs=1) as writer:
        for number in range(start, start + count):
            writer.append(data | {"number": np.int64(number)})
            writer.create_item("train", 1.0, {name: column[-1] for name, column in writer.history.items()})
            if (number + 1) % per_flush == 0:
                writer.flush()
        writer.flush()


def put_by_sessions(port: int, tokens: int, count: int) -> None:
    """64 threads, each waits for every one of its own."""
    share = count // AT_ONCE
    threads = [threading.Thread(target=put, args=(port, tokens, i * share, share, 1)) for i in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def take(port: int, count: int) -> list[int]:
    """Steps of 256, each packed; the trajectories' numbers."""
    client = reverb.Client(f"localhost:{port}")
    numbers: list[int] = []
    while len(numbers) < count:
        step = [
            s.data
            for s in client.sample("train", num_samples=min(STEP, count - len(numbers)), emit_timesteps=False)
        ]
        for column in range(4):  # in the order of the names: ids, logprobs, mask, number, versions
            np.concatenate([np.ravel(data[column]) for data in step])
        numbers += [int(np.ravel(data[3])[0]) for data in step]
    return numbers


def cpu_ms(count: int, work: Any, *arguments: Any) -> float:
    """Process CPU per trajectory."""
    began = time.process_time()
    work(*arguments)
    return (time.process_time() - began) / count * 1000


def stream(port: int, tokens: int, count: int) -> float:
    """Trajectories a second from the first put to the last packed step."""
    command = [sys.executable, __file__, "write", str(port), str(tokens), str(count)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline().strip() == "ready"
    began = time.perf_counter()
    writer.stdin.write("go\n")
    writer.stdin.flush()
    assert len(set(take(port, count))) == count
    wall = time.perf_counter() - began
    writer.wait()
    return count / wall


def crash(before: int, after: int, directory: str, tokens: int) -> tuple[int, int]:
    """A checkpoint, 256 of its 256 trained, 512 more acknowledged, kill -9, start from the checkpoint: lost, given out twice.

    It comes back on the port `after`: gRPC shares connections by address within a process, and the first call over one to the
    killed server would give a broken pipe.
    """
    server = start_server(before, directory)
    client = reverb.Client(f"localhost:{before}")
    put(before, tokens, 0, 256, GROUP)
    client.checkpoint()
    trained = set(take(before, 256))
    put(before, tokens, 256, 512, GROUP)
    server.kill()
    server.wait()
    server = start_server(after, directory)
    left = reverb.Client(f"localhost:{after}").server_info()["train"].current_size
    again = set(take(after, left)) if left else set()
    server.kill()
    server.wait()
    return 512 - len(again - trained), len(again & trained)


def main(tokens: int, count: int) -> None:
    """All figures."""
    import portpicker

    with tempfile.TemporaryDirectory() as directory:
        port = portpicker.pick_unused_port()
        server = start_server(port, directory + "/a")
        put(port, tokens, 0, 256, GROUP)
        take(port, 256)
        result: dict[str, float] = {"put_ms": cpu_ms(count, put_by_sessions, port, tokens, count)}
        take(port, count)
        result["bulk_put_ms"] = cpu_ms(count, put, port, tokens, 0, count, GROUP)
        take(port, count)
        result["rate"] = max(stream(port, tokens, count) for _ in range(2))
        server.kill()
        server.wait()
        before, after = portpicker.pick_unused_port(), portpicker.pick_unused_port()
        result["lost"], result["twice"] = crash(before, after, directory + "/b", tokens)
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "write":
        print("ready", flush=True)
        sys.stdin.readline()
        put(int(sys.argv[2]), int(sys.argv[3]), 0, int(sys.argv[4]), GROUP)
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
