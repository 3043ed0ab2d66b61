"""The dataset of a run: a JSONL file, or what a `module:function` gives. A prompt is a JSON object.

The text of a prompt is canonical JSON, and its digest goes into `GroupAdmitted`: a run that resumes with another dataset is
refused instead of training on other prompts under the old ids.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError
from schemas.settings import Settings

_DEFAULT_FUNCTION = "dataset"


def load_prompts(settings: Settings) -> Sequence[Mapping[str, Any]]:
    """All prompts. An empty setting means the function `dataset` beside the rollout's agent. Raises ConfigError."""
    source = settings.feeder.dataset
    if not source:
        module = settings.rollout.agent.partition(":")[0]
        source = f"{module}:{_DEFAULT_FUNCTION}"
    prompts = _from_file(Path(source)) if _is_file(source) else _from_function(source, settings)
    if not prompts:
        raise ConfigError(f"the dataset {source} has no prompts", dataset=source)
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Mapping):
            raise ConfigError(
                f"prompt {index} of {source} is no JSON object", dataset=source, prompt_index=index
            )
    return prompts


def prompt_text(prompt: Mapping[str, Any]) -> str:
    """Canonical JSON text. ConfigError: something in it is no JSON."""
    try:
        text = json.dumps(prompt, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()  # half a surrogate pair is a text of Python's, and of nobody else's
    except (TypeError, ValueError) as wrong:
        raise ConfigError(f"a prompt is no JSON: {wrong}", prompt=repr(prompt)[:200]) from wrong
    return text


def prompt_digest(text: str) -> str:
    """sha256 of the text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _is_file(source: str) -> bool:
    return ":" not in source or source.endswith((".jsonl", ".json")) or Path(source).is_file()


def _from_file(file: Path) -> Sequence[Mapping[str, Any]]:
    try:
        # not by `splitlines`: JSON's texts may hold U+2028 and others of its line ends as they are
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as unreadable:
        raise ConfigError(
            f"the dataset {file} cannot be read: {unreadable}", dataset=str(file)
        ) from unreadable
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(json.loads(line, parse_constant=_no_number))
        except ValueError as wrong:
            raise ConfigError(
                f"{file}, line {number}, is no JSON: {wrong}", dataset=str(file), line=number
            ) from wrong
    return prompts


def _no_number(name: str) -> float:
    """Python would read it, and the canonical text could not say it."""
    raise ValueError(f"{name} is no number")


def _from_function(source: str, settings: Settings) -> Sequence[Mapping[str, Any]]:
    module_name, _, name = source.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as missing:
        raise ConfigError(f"there is no dataset function {source}: {missing}", dataset=source) from missing
    arguments = (settings,) if inspect.signature(function).parameters else ()
    try:
        prompts = function(*arguments)
    except Exception as failure:  # boundary: somebody else's code, whatever it raises
        raise ConfigError(f"the dataset function {source} failed: {failure!r}", dataset=source) from failure
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise ConfigError(
            f"{source} gives {type(prompts).__name__}, not a sequence of prompts", dataset=source
        )
    return prompts
