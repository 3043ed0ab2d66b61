"""A run directory belongs to one supervisor at a time, and its successor waits for what the last one left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from stack.run_directory import SUPERVISOR, await_predecessors, claim


def leave(run_directory: Path, pid: int) -> None:
    facts = {"supervisor": {"pid": 1}, "broker": {"pid": pid}, "trainer": {"pid": None}}
    (run_directory / SUPERVISOR).write_text(json.dumps(facts))


def sleeper(*arguments: str) -> subprocess.Popen[bytes]:
    """A process that is there (its command line can be read only some time after the fork) until its input closes."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_a_run_that_is_up_is_not_claimed_twice(tmp_path: Path) -> None:
    claim(tmp_path)
    with pytest.raises(ConfigError, match="up already"):
        claim(tmp_path)


def test_a_child_of_this_run_is_waited_for(tmp_path: Path) -> None:
    with sleeper(f"--data={tmp_path}") as child:
        leave(tmp_path, child.pid)
        assert not await_predecessors(tmp_path, patience_s=0.3)
    assert await_predecessors(tmp_path, patience_s=0.3)


def test_another_process_with_a_pid_that_came_again_is_not(tmp_path: Path) -> None:
    with sleeper("--data=/elsewhere") as stranger:
        leave(tmp_path, stranger.pid)
        assert await_predecessors(tmp_path, patience_s=0.0)


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_state_file_that_says_nothing_holds_nobody(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / SUPERVISOR).write_text(text)
    assert await_predecessors(tmp_path, patience_s=0.0)
