from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schemas.settings import Settings, load
from stack.cli import app
from stack.run_directory import write_settings

PARTS = ("proxy", "assembler", "controller", "feeder", "trainer", "archiver", "rollout")


def hoofprint(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_every_command_is_there() -> None:
    shown = hoofprint("--help").output
    for command in (
        "up",
        "demo",
        "part",
        "prepare",
        "config",
        "topics",
        "sql",
        "replay",
        "whatif",
        "broker",
        "version",
    ):
        assert f" {command} " in shown


def test_the_printed_configuration_is_one_that_loads(tmp_path: Path) -> None:
    printed = hoofprint("config").stdout
    file = tmp_path / "hoofprint.toml"
    file.write_text(printed)
    assert tomllib.loads(printed).keys() == Settings.model_fields.keys()
    assert load(file) == load()


def test_config_shows_what_file_and_set_result_in(tmp_path: Path) -> None:
    file = tmp_path / "hoofprint.toml"
    file.write_text("[window]\nkeep_versions = 7\norder = 'observed'\n")
    shown = hoofprint("config", "--config", str(file), "--set", "window.keep_versions=3")
    settings = Settings.from_json(shown.stdout)
    assert (settings.window.keep_versions, settings.window.order) == (3, "observed")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("up", "--set", "window.keep_version=1"), "setting window.keep_version"),
        (("up", "--set", "engine.model=/no/such/model"), "there is no checkpoint directory /no/such/model"),
        (("up", "--config", "/no/such/file.toml"), "no settings file at /no/such/file.toml"),
        (("demo", "--task", "chess"), "there is no demo chess; demos are dial, smollm2"),
        (("demo", "--engine", "abacus"), "there is no engine abacus"),
        (("part", "nobody"), "there is no part nobody"),
        (("part", "proxy", "--settings", "/no/such/settings.json"), "no settings at /no/such/settings.json"),
        (("sql", "no-such-run"), "there is no run no-such-run"),
        (("sql",), "sql wants a RUN"),
        (("replay", "no-such-run", "--verify"), "there is no run no-such-run"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(arguments: tuple[str, ...], sentence: str) -> None:
    answer = hoofprint(*arguments)
    assert answer.exit_code == 2
    assert sentence in answer.stderr
    assert answer.stderr.startswith("error: ")
    assert "Traceback" not in answer.stderr


def test_the_named_queries_are_listed_without_a_run() -> None:
    answer = hoofprint("sql", "--named")
    assert answer.exit_code == 0
    assert "drift_by_lag" in answer.stdout.splitlines()


def test_a_run_s_own_settings_are_no_configuration_and_the_error_says_what_is(tmp_path: Path) -> None:
    written = write_settings(_prepared(tmp_path))
    answer = hoofprint("up", "--config", str(written))
    assert answer.exit_code == 2
    assert "hoofprint part --settings" in answer.stderr
    assert "TOML file that it was started with" in answer.stderr


def _prepared(tmp_path: Path) -> Settings:
    settings = Settings.model_validate({"run": {"run_id": "r", "directory": str(tmp_path)}})
    settings.run_directory.mkdir()
    return settings


def test_a_mistake_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hoofprint("up", "--set", "engine.model=/no/such/model")
    hoofprint("sql", "no-such-run")
    assert list(tmp_path.iterdir()) == []


def test_topics_names_all_of_them() -> None:
    shown = hoofprint("topics").stdout
    assert "control.v1  key run_id, partitions 1" in shown
    assert shown.count("  key ") == 7


def test_replay_wants_one_of_its_two_forms(tmp_path: Path) -> None:
    settings = load(sets=(f"run.directory={tmp_path}",))
    settings.run_directory.mkdir()
    write_settings(settings)
    for flags in ((), ("--verify", "--to", "other")):
        assert "either --verify or --to" in hoofprint("replay", str(settings.run_directory), *flags).stderr


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_a_module_with_main(name: str) -> None:
    from stack.parts import MODULES

    code = f"import importlib; assert callable(importlib.import_module({MODULES[name]!r}).main)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
