"""Where prompts come from, and what a wrong dataset says."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.settings import Settings, load
from streams.feeder_dataset import load_prompts, prompt_digest, prompt_text


def dataset_is(source: str, **sets: str) -> Settings:
    return load(
        sets=(
            f"feeder.dataset={json.dumps(source)}",
            *[f"{k.replace('__', '.')}={v}" for k, v in sets.items()],
        )
    )


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("prompts_of_a_test")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_file_gives_one_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"q": "ä"}\n\n{"q": 2}\n', encoding="utf-8")
    assert list(load_prompts(dataset_is(str(file)))) == [{"q": "ä"}, {"q": 2}]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x7f", "\ufeff"])
def test_a_text_may_hold_what_python_takes_for_a_line_end(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = [{"q": f"a{mark}b"}, {"q": "c"}]
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    assert list(load_prompts(dataset_is(str(file)))) == prompts


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_what_is_no_json_is_refused_before_the_run_begins(tmp_path: Path, value: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"q": 1}}\n{{"q": {value}}}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line 2.*{value} is no number"):
        load_prompts(dataset_is(str(file)))


def test_half_a_surrogate_pair_has_no_text() -> None:
    with pytest.raises(ConfigError, match="no JSON"):
        prompt_text({"q": json.loads('"\\ud800"')})


def test_a_function_is_given_the_settings_if_it_wants_them(module: Any) -> None:
    module.plain = lambda: [{"n": 1}]
    module.by_seed = lambda settings: [{"seed": settings.run.seed}]
    assert load_prompts(dataset_is("prompts_of_a_test:plain")) == [{"n": 1}]
    assert load_prompts(dataset_is("prompts_of_a_test:by_seed", run__seed="7")) == [{"seed": 7}]


def test_an_empty_setting_means_the_dataset_beside_the_agent(module: Any) -> None:
    module.dataset = lambda: [{"n": 1}]
    assert load_prompts(dataset_is("", rollout__agent="prompts_of_a_test:agent")) == [{"n": 1}]


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"q": 1}\n\n{"q": \n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_prompts(dataset_is(str(file)))
    assert caught.value.detail["line"] == 3


@pytest.mark.parametrize("text", ["", "\n\n", "[1]\n", "3\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_prompts(dataset_is(str(file)))


@pytest.mark.parametrize("source", ["no/such/file.jsonl", "no_such_module:f", "json:no_such", "json:dumps"])
def test_a_source_that_gives_no_prompts_is_refused(source: str) -> None:
    with pytest.raises(ConfigError):
        load_prompts(dataset_is(source))


@pytest.mark.parametrize("given", ["text", 3, {"a": 1}])
def test_a_function_that_gives_no_sequence_is_refused(module: Any, given: object) -> None:
    module.dataset = lambda: given
    with pytest.raises(ConfigError):
        load_prompts(dataset_is("prompts_of_a_test:dataset"))


def test_the_text_of_a_prompt_is_canonical() -> None:
    assert prompt_text({"b": 1, "a": "ä"}) == prompt_text({"a": "ä", "b": 1}) == '{"a":"ä","b":1}'
    assert prompt_digest("x") == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        prompt_text({"v": value})
