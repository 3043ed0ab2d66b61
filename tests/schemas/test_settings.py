"""One settings tree: layers, refusals, the rendered file, and the round trip through a run's JSON."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.settings import Settings, load, render_toml


@pytest.fixture(autouse=True)
def _no_variables_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HOOFPRINT_")]:
        monkeypatch.delenv(name)


def test_the_rendered_file_is_all_defaults_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "hoofprint.toml"
    file.write_text(render_toml(), encoding="utf-8")
    assert load(file) == Settings()
    assert all(not keys for keys in tomllib.loads(render_toml()).values())


def test_the_rendered_file_with_every_comment_taken_away_is_the_defaults(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", render_toml(), flags=re.MULTILINE)
    parsed = tomllib.loads(text)
    assert {name: set(keys) for name, keys in parsed.items()} == {
        name: set(section) for name, section in Settings().model_dump().items()
    }
    file = tmp_path / "hoofprint.toml"
    file.write_text(text, encoding="utf-8")
    assert load(file) == Settings()


def test_every_setting_says_what_it_is_for() -> None:
    for name, field in Settings.model_fields.items():
        for key, setting in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert setting.description, f"{name}.{key}"


def test_file_then_environment_then_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.toml"
    file.write_text(
        "[window]\nkeep_versions = 3\norder = 'observed'\n[batch]\nsize = 4\n[group]\nsize = 5\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("HOOFPRINT_WINDOW__KEEP_VERSIONS", "5")
    monkeypatch.setenv("HOOFPRINT_BATCH__SIZE", "6")
    settings = load(file, sets=("batch.size=7",), base={"group": {"size": 3, "max_retries": 9}})
    assert (settings.window.keep_versions, settings.window.order) == (5, "observed")
    assert settings.batch.size == 7
    assert (settings.group.size, settings.group.max_retries) == (5, 9)


def test_a_preset_is_not_changed_by_what_lies_above_it() -> None:
    base = {"group": {"size": 3}}
    load(sets=("group.size=4",), base=base)
    assert base == {"group": {"size": 3}}


@pytest.mark.parametrize(
    ("assignment", "key"),
    [("window.keep=1", "window.keep"), ("windwo.keep_versions=1", "windwo"), ("window.keep_versions=-1", "window.keep_versions"),
     ("window.keep_versions=many", "window.keep_versions"), ("window=1", "window"), ("group.size=1", "group.size"),
     ("batch.by=tokens", "batch.by"), ("run.run_id=a/b", "run.run_id")],
)  # fmt: skip
def test_a_wrong_set_names_the_key(assignment: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(sets=(assignment,))
    assert caught.value.detail["key"] == key


@pytest.mark.parametrize("assignment", ["window.keep_versions", "=1", "window.=1", ""])
def test_a_set_without_key_or_value_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError):
        load(sets=(assignment,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOOFPRINT_WINDOW__KEEP", "1"),
        ("HOOFPRINT_WINDWO__KEEP_VERSIONS", "1"),
        ("HOOFPRINT_PROXY__ENGINES", "http://a"),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        load()


def test_lists_and_absent_values_in_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOFPRINT_PROXY__ENGINES", '["http://a", "http://b"]')
    assert load().proxy.engines == ("http://a", "http://b")
    assert load(sets=('proxy.engines=["http://c"]',)).proxy.engines == ("http://c",)
    base = {"feeder": {"eta": 3}}
    assert load(base=base).feeder.eta == 3
    assert load(sets=("feeder.eta=none",), base=base).feeder.eta is None
    file = tmp_path / "f.toml"
    file.write_text('[feeder]\neta = "none"\n', encoding="utf-8")
    assert load(file, base=base).feeder.eta is None
    monkeypatch.setenv("HOOFPRINT_FEEDER__ETA", "none")
    assert load(base=base).feeder.eta is None


@pytest.mark.parametrize("value", ["7", "2024-01-01", "true", "1.5"])
def test_a_text_setting_takes_what_looks_like_something_else(value: str) -> None:
    assert load(sets=(f"run.run_id={value}",)).run.run_id == value


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[window\n", encoding="utf-8")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for file in (tmp_path / "missing.toml", tmp_path, broken, binary):
        with pytest.raises(ConfigError) as caught:
            load(file)
        assert caught.value.detail["file"] == str(file)


def test_a_batch_that_could_never_be_filled_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_outstanding_groups"):
        load(sets=("feeder.max_outstanding_groups=4", "batch.size=5"))
    assert (
        load(sets=("feeder.max_outstanding_groups=4", "batch.size=5", "batch.by=sequences")).batch.size == 5
    )


def test_the_json_of_a_run_gives_the_same_tree_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = load(sets=("window.keep_versions=7", 'proxy.engines=["http://a"]', "feeder.eta=2"))
    monkeypatch.setenv("HOOFPRINT_WINDOW__KEEP_VERSIONS", "1")
    monkeypatch.setenv("HOOFPRINT_WINDOW__NO_SUCH", "1")
    again = Settings.from_json(settings.to_json())
    assert again == settings
    assert again.digest() == settings.digest()


def test_secrets_stay_out_of_the_log() -> None:
    settings = load(sets=("proxy.admin_key=secret",))
    assert "secret" not in settings.to_json()
    assert Settings.from_json(settings.to_json(secrets=True)).proxy.admin_key == "secret"
    assert settings.digest() == load().digest()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"window": 1}', '{"no_such": {}}'])
def test_json_that_is_no_tree_of_ours_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError):
        Settings.from_json(text)


def test_paths_of_a_run() -> None:
    settings = load(sets=("run.run_id=x", "run.directory=somewhere"))
    assert settings.run_directory == Path("somewhere/x")
    assert settings.payload_url == str(Path("somewhere/x/payloads").absolute())
    assert load(sets=("payload.url=memory://p",)).payload_url == "memory://p"


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (
            ("window.keep_version=4",),
            "there is no setting window.keep_version; did you mean window.keep_versions?",
        ),
        (("wnidow.keep_versions=4",), "there is no setting wnidow; did you mean window?"),
        (("zzz.qqq=4",), "there is no setting zzz"),
        (("window.zzzzzzzzz=1", "trainer.steps=0"), "there is no setting window.zzzzzzzzz (and 1 more)"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest_known_one(sets: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(sets=sets)
    assert refused.value.message == sentence
