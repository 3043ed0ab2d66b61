"""What a run consists of, as data: nothing is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.settings import Settings, load
from stack.endpoints import PortBook
from stack.plan import ALL, ENGINE, REPLAY, parts_of, resolve
from stack.run_directory import claim, find_run, read_settings, write_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "model"
    model.mkdir()
    return load(sets=(f"run.directory={tmp_path}", f"engine.model={model}", "rollout.workers=2"))


def test_a_resolved_run_has_every_address(settings: Settings) -> None:
    resolved = resolve(settings)
    assert resolved.kafka.bootstrap_servers.startswith("127.0.0.1:")
    assert resolved.proxy.port > 0
    assert len(resolved.proxy.engines) == 1
    assert Path(resolved.run.directory).is_absolute()


def test_a_run_keeps_its_addresses(settings: Settings) -> None:
    assert resolve(settings) == resolve(settings)


def test_addresses_that_were_given_stay(settings: Settings) -> None:
    given = load(
        sets=(
            f"run.directory={settings.run.directory}", f"engine.model={settings.engine.model}",
            "kafka.bootstrap_servers=broker:9092", 'proxy.engines=["http://gpu:30000"]',
        )
    )  # fmt: skip
    resolved = resolve(given)
    assert resolved.kafka.bootstrap_servers == "broker:9092"
    assert resolved.proxy.engines == ("http://gpu:30000",)


def test_the_parts_of_a_run(settings: Settings) -> None:
    parts = {part.name: part for part in parts_of(resolve(settings))}
    assert list(parts) == [
        "broker", "engine", "proxy", "controller", "archiver", "assembler", "trainer", "rollout-0", "rollout-1", "feeder",
    ]  # fmt: skip
    assert {name for name, part in parts.items() if part.finite} == {"trainer", "feeder"}
    assert all(part.after == ("broker",) for name, part in parts.items() if name not in ("broker", "engine"))


def test_who_writes_the_log_stops_before_who_reads_it(settings: Settings) -> None:
    wave = {part.name: part.wave for part in parts_of(resolve(settings))}
    for earlier, later in [
        ("rollout-0", "proxy"), ("feeder", "controller"), ("trainer", "controller"), ("proxy", "assembler"),
        ("assembler", "controller"), ("controller", "archiver"), ("archiver", "broker"),
    ]:  # fmt: skip
        assert wave[earlier] > wave[later]


def test_roles_leave_out_what_others_run(settings: Settings) -> None:
    resolved = resolve(settings)
    assert {part.name for part in parts_of(resolved, REPLAY)} == {
        "broker",
        "controller",
        "archiver",
        "assembler",
    }
    assert "engine" not in {part.name for part in parts_of(resolved, ALL - {ENGINE})}


def test_children_read_what_was_resolved(settings: Settings) -> None:
    resolved = resolve(settings)
    path = write_settings(resolved)
    assert read_settings(resolved.run_directory) == resolved
    proxy = next(part for part in parts_of(resolved) if part.name == "proxy")
    assert proxy.argv[-2:] == ("--settings", str(path))


def test_a_run_is_up_once(tmp_path: Path) -> None:
    claim(tmp_path / "run")
    with pytest.raises(ConfigError, match="is up already"):
        claim(tmp_path / "run")


def test_runs_are_found_by_directory_and_by_id(settings: Settings, tmp_path: Path) -> None:
    write_settings(resolve(settings))
    assert find_run(str(tmp_path / "run")) == tmp_path / "run"
    assert find_run("run", runs=tmp_path) == tmp_path / "run"
    with pytest.raises(ConfigError, match="there is no run other"):
        find_run("other", runs=tmp_path)


def test_a_taken_port_is_replaced_unless_it_was_asked_for(tmp_path: Path) -> None:
    book = tmp_path / "ports.json"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        book.write_text(json.dumps({"proxy": taken}))
        assert PortBook(book).port("proxy") != taken
        with pytest.raises(ConfigError, match=f"port {taken} for proxy is in use"):
            PortBook(book).port("proxy", taken)


def test_a_run_without_a_model_makes_its_first_weights(tmp_path: Path) -> None:
    resolved = resolve(load(sets=(f"run.directory={tmp_path}",)))
    parts = {part.name: part for part in parts_of(resolved)}
    assert parts["checkpoint"].argv[-2:] == (resolved.engine.model, "0")
    assert parts["engine"].after == ("checkpoint",)
    assert parts["trainer"].after == ("broker", "checkpoint")
    Path(resolved.engine.model).mkdir()
    assert "checkpoint" not in {part.name for part in parts_of(resolved)}


def test_a_replay_needs_no_model(tmp_path: Path) -> None:
    resolved = resolve(load(sets=(f"run.directory={tmp_path}",)), REPLAY)
    assert {part.name for part in parts_of(resolved, REPLAY)} == {
        "broker",
        "controller",
        "archiver",
        "assembler",
    }
