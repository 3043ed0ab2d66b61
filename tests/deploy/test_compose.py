"""docker-compose.yml is valid by the compose schema, runs every part once, and its settings load. It is never started here."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.settings import load
from stack.parts import MODULES

ROOT = Path(__file__).parents[2]
DCLINT = ROOT / "node_modules" / ".bin" / "dclint"
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not DCLINT.exists(),
    reason="dclint is not installed: `make test` does it where npm is",
)


def _lint(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DCLINT, "--max-warnings", "0", file], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"])


@needs_node
def test_compose_file_is_valid() -> None:
    found = _lint(ROOT / "docker-compose.yml")
    assert found.returncode == 0, found.stdout


@needs_node
def test_the_validator_refuses_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text("services:\n  a:\n    image: x:1\n    imagee: y\n")
    assert _lint(wrong).returncode != 0


def test_every_part_runs_once(services: dict[str, Any]) -> None:
    commands = [s["command"] for s in services.values() if "command" in s]
    parts = sorted(c[2] for c in commands if c[:2] == ["hoofprint", "part"])
    assert parts == sorted(MODULES)


def test_the_sglang_profile_reserves_a_gpu(services: dict[str, Any]) -> None:
    gpu = [s for s in services.values() if s.get("profiles") == ["gpu"]]
    devices = [d for s in gpu for d in s["deploy"]["resources"]["reservations"]["devices"]]
    assert [d["capabilities"] for d in devices] == [["gpu"]]


def test_both_engines_answer_to_the_configured_name(services: dict[str, Any]) -> None:
    host = load(ROOT / "deploy" / "compose.toml").proxy.engines[0].removeprefix("http://").partition(":")[0]
    named = [name for name, s in services.items() if host in json.dumps(s.get("networks", {}))]
    assert sorted(named) == ["engine-cpu", "engine-sglang"]


def test_only_the_loopback_is_published(services: dict[str, Any]) -> None:
    ports = [p for s in services.values() for p in s.get("ports", ())]
    assert ports
    assert all(str(p).startswith("127.0.0.1:") for p in ports)
