"""The launcher of SGLang: its command line, and that nothing of the group outlives it. SGLang itself is not started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from schemas.errors import ConfigError
from schemas.settings import load
from stack.plan import parts_of, resolve
from stack.sglang import environment
from stack.sglang.command import MOST_TOKENS, Options, arguments

FAMILY = """
import subprocess, sys, time
orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
middle = (
    "import os, subprocess, sys; keep = os.dup(1); "
    f"made = subprocess.Popen([sys.executable, '-c', {orphan!r}], stdout=subprocess.PIPE, pass_fds=[keep]); "
    "sys.stdout.write(made.stdout.readline().decode())"
)
subprocess.run([sys.executable, "-c", middle])
time.sleep(600 if sys.argv[1] == "stay" else 0)
"""
"""A child whose grandchild is an orphan that ignores SIGTERM, as a scheduler in a long forward pass does."""
SERVE = "import sys; from stack.sglang.launch import serve; sys.exit(serve([sys.executable, '-c', *sys.argv[1:]], {}))"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 512}')
    return tmp_path / "model"


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_cache_holds_every_running_request_within_a_bound(checkpoint: Path) -> None:
    argv = arguments(Options(checkpoint, 1, max_running=16))
    assert (option(argv, "--context-length"), option(argv, "--max-total-tokens")) == ("512", str(16 * 512))
    argv = arguments(Options(checkpoint, 1, max_running=1000, context_length=256))
    assert (option(argv, "--context-length"), option(argv, "--max-total-tokens")) == ("256", str(MOST_TOKENS))


def test_a_mixture_of_experts_tells_its_routes(checkpoint: Path) -> None:
    assert "--enable-return-routed-experts" not in arguments(Options(checkpoint, 1))
    (checkpoint / "config.json").write_text('{"max_position_embeddings": 512, "num_experts": 4}')
    assert "--enable-return-routed-experts" in arguments(Options(checkpoint, 1))
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no checkpoint"):
        arguments(Options(checkpoint, 1))


def test_a_checkpoint_without_a_tokenizer_is_served_by_ids_alone(checkpoint: Path) -> None:
    assert "--skip-tokenizer-init" in arguments(Options(checkpoint, 1))
    (checkpoint / "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in arguments(Options(checkpoint, 1))


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        arguments(Options(tmp_path, 1))


def test_without_its_environment_the_sentence_says_what_makes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="make sglang-setup"):
        environment.interpreter()


def test_the_lock_has_versions_and_hashes_and_no_address() -> None:
    text = environment.REQUIREMENTS.read_text()
    assert "sglang==0.5.23 \\\n    --hash=sha256:" in text
    assert "://" not in text


def test_a_run_with_sglang_starts_the_launcher_with_the_engines_flags(
    tmp_path: Path, checkpoint: Path
) -> None:
    sets = (f"run.directory={tmp_path}", f"engine.model={checkpoint}", "engine.server=sglang")
    engine = next(part for part in parts_of(resolve(load(sets=sets))) if part.name == "engine")
    assert engine.argv[1:3] == ("-m", "stack.sglang.launch")
    assert option(list(engine.argv), "--model-path") == str(checkpoint)


def family(parent: psutil.Process) -> list[psutil.Process]:
    return [p for p in parent.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def until(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def serving(how: str) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, FAMILY, how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end_it_returns_when_the_whole_group_is_gone(number: signal.Signals) -> None:
    launcher = serving("stay")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    own = psutil.Process(launcher.pid)
    until(lambda: len(family(own)) == 2)  # the child, and the orphan that was adopted
    members = family(own)
    launcher.send_signal(number)
    assert launcher.wait(30) == 0
    assert [p for p in members if p.is_running()] == []


def test_a_child_that_ends_by_itself_takes_its_orphans_with_it() -> None:
    launcher = serving("leave")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    assert launcher.wait(30) == 1
    assert launcher.stdout.read() == b""  # which ends when the last member has closed it


def test_a_killed_launcher_takes_its_child_with_it() -> None:
    launcher = serving("stay")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    own = psutil.Process(launcher.pid)
    until(lambda: len(family(own)) == 2)
    child, orphan = sorted(family(own), key=lambda p: p.create_time())
    launcher.kill()
    launcher.wait(10)
    try:
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        orphan.kill()
