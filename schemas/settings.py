"""One settings tree: defaults here, then one TOML file, then the environment (`HOOFPRINT_WINDOW__KEEP_VERSIONS=2`), then
`--set window.keep_versions=2`. Unknown keys are refused. `render_toml` writes every default, commented.

`load` alone looks at the environment: a tree read from a run's JSON is what was written, wherever it is read. A setting
that may be absent is written "none" in TOML, in the environment and in `--set`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError

from schemas.errors import ConfigError
from schemas.settings_sections import (
    ArchiveSettings,
    AssemblerSettings,
    BatchSettings,
    EngineSettings,
    FeederSettings,
    GroupSettings,
    KafkaSettings,
    MetricsSettings,
    PayloadSettings,
    ProxySettings,
    RetrySettings,
    RolloutSettings,
    RunSettings,
    Section,
    StalenessSettings,
    TrainerSettings,
    WatchdogSettings,
    WindowSettings,
)

__all__ = [
    "ArchiveSettings",
    "AssemblerSettings",
    "BatchSettings",
    "EngineSettings",
    "FeederSettings",
    "GroupSettings",
    "KafkaSettings",
    "MetricsSettings",
    "PayloadSettings",
    "ProxySettings",
    "RetrySettings",
    "RolloutSettings",
    "RunSettings",
    "Section",
    "Settings",
    "StalenessSettings",
    "TrainerSettings",
    "WatchdogSettings",
    "WindowSettings",
    "load",
    "render_toml",
]

ENV_PREFIX = "HOOFPRINT_"
ENV_DELIMITER = "__"
_WRITTEN_BY_UP = (
    "; a run's settings.json has the addresses of one start in it: it is for `hoofprint part --settings`, and `hoofprint up`"
    " goes on with a run by the TOML file that it was started with"
)


class Settings(BaseModel):
    """The tree."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunSettings = RunSettings()
    kafka: KafkaSettings = KafkaSettings()
    payload: PayloadSettings = PayloadSettings()
    window: WindowSettings = WindowSettings()
    staleness: StalenessSettings = StalenessSettings()
    group: GroupSettings = GroupSettings()
    retry: RetrySettings = RetrySettings()
    batch: BatchSettings = BatchSettings()
    feeder: FeederSettings = FeederSettings()
    proxy: ProxySettings = ProxySettings()
    engine: EngineSettings = EngineSettings()
    trainer: TrainerSettings = TrainerSettings()
    rollout: RolloutSettings = RolloutSettings()
    archive: ArchiveSettings = ArchiveSettings()
    assembler: AssemblerSettings = AssemblerSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    metrics: MetricsSettings = MetricsSettings()

    @model_validator(mode="after")
    def _a_batch_can_be_filled(self) -> Settings:
        """Groups that wait for a batch are outstanding, too: with fewer places than a batch needs, none would ever go out."""
        if self.batch.by == "groups" and self.feeder.max_outstanding_groups < self.batch.size:
            raise ValueError(
                f"feeder.max_outstanding_groups = {self.feeder.max_outstanding_groups} is less than"
                f" batch.size = {self.batch.size}: no batch could ever be filled"
            )
        return self

    @model_validator(mode="after")
    def _there_is_something_to_wait_for(self) -> Settings:
        if self.staleness.mode == "wait" and not self.window.keep_versions:
            raise ValueError("staleness.mode = wait needs a window: window.keep_versions is 0")
        return self

    @model_validator(mode="after")
    def _what_waits_can_be_counted(self) -> Settings:
        """`wait` promises that nothing becomes stale, and counts in batches what is under way: it has to know their size."""
        if self.staleness.mode == "wait" and self.batch.by == "sequences":
            raise ValueError(
                "staleness.mode = wait needs batch.by = groups: how many sequences a running group will give is not known"
                " before it ends, so how many batches it fills is not, either"
            )
        return self

    @property
    def run_directory(self) -> Path:
        """<directory>/<run_id>."""
        return Path(self.run.directory) / self.run.run_id

    @property
    def payload_url(self) -> str:
        """Root of the payload store."""
        return self.payload.url or str((self.run_directory / "payloads").absolute())

    def to_json(self, *, secrets: bool = False) -> str:
        """Canonical JSON text: what RunConfigured carries. Secrets are left out unless asked for."""
        tree = self.model_dump(mode="json")
        if not secrets:
            tree["proxy"]["admin_key"] = ""
        return json.dumps(tree, sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """sha256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The tree that `to_json` wrote; the environment has no say. Raises ConfigError."""
        try:
            return _validated(json.loads(text))
        except json.JSONDecodeError as wrong:
            raise ConfigError(f"the settings are not JSON: {wrong}") from wrong


def load(
    file: Path | None = None, sets: tuple[str, ...] = (), base: dict[str, Any] | None = None
) -> Settings:
    """`base` (a preset) < `file` < environment < `sets` (`a.b=value`, value as TOML or else text). Raises ConfigError."""
    tree = deepcopy(base or {})
    if file is not None:
        _merge(tree, _read_toml(file))
    _merge(tree, _environment())
    for assignment in sets:
        _merge(tree, _parse_set(assignment))
    return _validated(tree)


def _validated(tree: object) -> Settings:
    try:
        return Settings.model_validate(tree)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        problem = _no_such(key) if first["type"] == "extra_forbidden" else _sentence(key, first["msg"])
        more = wrong.error_count() - 1
        raise ConfigError(
            problem + (f" (and {more} more)" if more else ""), key=key, problem=problem, count=more + 1
        ) from wrong


def _sentence(key: str, problem: str) -> str:
    return f"setting {key}: {problem}" if key else problem


def _no_such(key: str) -> str:
    known = [f"{name}.{setting}" for name in Settings.model_fields for setting in _section(name).model_fields]
    near = get_close_matches(key, [*known, *Settings.model_fields], n=1)
    return f"there is no setting {key}" + (f"; did you mean {near[0]}?" if near else "")


def _section(name: str) -> type[Section]:
    section = Settings.model_fields[name].annotation
    assert isinstance(section, type)
    assert issubclass(section, Section)
    return section


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as missing:
        raise ConfigError(f"no settings file at {file}", file=str(file)) from missing
    except OSError as unreadable:
        raise ConfigError(f"{file} cannot be read: {unreadable.strerror}", file=str(file)) from unreadable
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        hint = _WRITTEN_BY_UP if file.suffix == ".json" else ""
        raise ConfigError(f"{file} is not TOML: {wrong}{hint}", file=str(file)) from wrong


class _Named(BaseSettings, Settings):  # type: ignore[misc]  # both configurations fit together here
    """The tree as pydantic-settings wants to see it, for the names of the variables alone."""


def _environment() -> dict[str, Any]:
    """What the environment sets. A variable of an unknown section is refused: it would have no effect."""
    for name in os.environ:
        section, delimiter, _ = name.upper().removeprefix(ENV_PREFIX).partition(ENV_DELIMITER)
        if name.upper().startswith(ENV_PREFIX) and delimiter and section.lower() not in Settings.model_fields:
            raise ConfigError(
                f"the environment sets {name}, but there is no section {section.lower()}", key=name
            )
    try:
        source = EnvSettingsSource(_Named, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER)
        return source()
    except SettingsError as wrong:
        raise ConfigError(f"the environment: {wrong} (lists are written as JSON)") from wrong


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = dict(value) if isinstance(value, dict) else value


def _parse_set(assignment: str) -> dict[str, Any]:
    path, sign, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise ConfigError(f"--set wants key=value, not {assignment!r}", assignment=assignment)
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    if _is_text(keys) and not isinstance(value, str):
        value = text.strip()  # a run id may look like a number or a date
    for part in reversed(keys):
        value = {part: value}
    return dict(value)


def _is_text(keys: list[str]) -> bool:
    section = Settings.model_fields.get(keys[0])
    fields = getattr(section.annotation, "model_fields", {}) if section is not None and len(keys) == 2 else {}
    return keys[-1] in fields and fields[keys[-1]].annotation is str


def render_toml() -> str:
    """The whole tree as a TOML file in which every default is commented out."""
    lines = ["# Hoofprint: every setting with its default. Take away the # to change one.", ""]
    for name in Settings.model_fields:
        section = _section(name)
        lines += [*(f"# {line}" for line in (section.__doc__ or "").splitlines()), f"[{name}]"]
        for key, setting in section.model_fields.items():
            default = setting.get_default()
            lines += [
                *(f"# {line}" for line in (setting.description or "").splitlines()),
                f"# {key} = {_toml(default)}",
                "",
            ]
    return "\n".join(lines)


def _toml(value: object) -> str:
    """JSON's texts, numbers, lists and truth values are TOML's."""
    return json.dumps("none" if value is None else value)
