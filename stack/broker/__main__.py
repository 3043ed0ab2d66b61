"""`python -m stack.broker --data DIR --port N [--log FILE]`: the broker in the foreground.

Python prepares (jars, Java, configuration, format) and then becomes Java (exec, the same pid), so that a
supervisor which started this command signals and waits for the broker itself. It is ready when
`ready.await_broker` returns. SIGTERM stops it cleanly (exit status 143). If the preparation fails: one line
on stderr, exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from schemas.errors import HoofprintError
from stack.broker.directory import prepare
from stack.broker.jars import ensure_jars
from stack.broker.java import find_java
from stack.broker.tether import tie_to_parent


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Prepare, then become the broker; returns never."""
    parser = argparse.ArgumentParser(
        prog="python -m stack.broker", description="Run the embedded Kafka in the foreground."
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="data directory, kept; made and formatted if new"
    )
    parser.add_argument("--port", type=int, default=0, help="0 (default): the directory's own, or a free one")
    parser.add_argument("--log", type=Path, help="append the broker's output to this file instead of stderr")
    parser.add_argument(
        "--with-parent", action="store_true", help="stop when the process that started this one ends"
    )
    options = parser.parse_args(argv)
    if options.with_parent:
        tie_to_parent(os.getppid())
    try:
        launch = prepare(options.data, options.port, java=find_java(), jars=ensure_jars())
    except HoofprintError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.log:
        _redirect(options.log)
    os.set_inheritable(launch.lock_fd, True)
    os.execve(launch.argv[0], launch.argv, launch.environ)  # noqa: S606 - a list of our own, no shell


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)


if __name__ == "__main__":
    main()
