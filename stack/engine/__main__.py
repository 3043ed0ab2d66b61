"""`python -m stack.engine`: serve one checkpoint on one port until SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m stack.engine", description=__doc__)
    p.add_argument("--model-path", type=Path, required=True, help="Hugging Face checkpoint directory")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--weight-version", default="default", help="label of the first weights")
    p.add_argument("--threads", type=int, default=1, help="threads of the forward pass")
    p.add_argument("--max-running", type=int, default=128, help="requests that decode together")
    p.add_argument("--context-length", type=int, default=None, help="default: the checkpoint's")
    p.add_argument("--random-seed", type=int, default=0, help="seed of requests that bring none")
    p.add_argument(
        "--min-step-ms",
        type=float,
        default=0.0,
        help="a decode step takes at least this long: a tiny model generates faster than any trainer can step, and "
        "pacing makes generation time comparable with a training step, so that weight updates interrupt generations",
    )
    p.add_argument(
        "--prefix-cache-mb",
        type=int,
        default=256,
        help="keys and values kept of finished requests, for the next turn of a session; 0: none",
    )
    p.add_argument(
        "--incremental-streaming-output", action="store_true", help="stream deltas, not everything so far"
    )
    return p


def _end(signum: int, frame: FrameType | None) -> None:
    """A clean end, also while loading: the server raises the signal again after it has shut down."""
    raise SystemExit(0)


def keep_freed_memory() -> None:
    """Let malloc reuse the megabytes of each step's intermediates instead of returning them to the system.

    Every page would be faulted in again at the next step: about a tenth of the time of a 135M model. Not
    fatal where the C library has no `mallopt`.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most that glibc takes
        libc.mallopt(top_pad, 64 << 20)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


def main() -> int:
    """Load, then serve; a checkpoint that cannot be served is one sentence and exit code 2."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, _end)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    keep_freed_memory()
    import uvicorn

    from schemas.errors import ConfigError
    from stack.engine.control import EngineOptions
    from stack.engine.server import Engine

    options = vars(args)
    host, port = options.pop("host"), options.pop("port")
    try:
        engine = Engine(EngineOptions(**options))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    uvicorn.run(
        engine,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=1,
        backlog=1024,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
