"""What a run that goes on keeps of the settings it began with, whatever the settings say now. Pure.

The controller folds by the first `RunConfigured` of the log for ever. Feeder, assembler and proxy read settings of their own, and
must not count in other numbers: a feeder that believes in smaller batches than the controller would wait for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from schemas.errors import IncompatibleEvent
from schemas.events import Event, RunConfigured
from schemas.settings import Settings
from streams.control_state import fold_settings

_KEPT = ("window", "group", "batch", "retry")
_FREE = frozenset({"group.timeout_s"})  # no part of the fold: a time-out is an event before it decides


def first_configuration(log: Iterable[Event]) -> RunConfigured | None:
    """The one that the controller goes by: of those that it cannot read it has buried each."""
    for event in log:
        if isinstance(event, RunConfigured):
            try:
                fold_settings(event)
            except IncompatibleEvent:
                continue
            return event
    return None


def as_begun(settings: Settings, first: RunConfigured) -> tuple[Settings, list[str]]:
    """The settings with what the run began with, and what that changes, as `section.key = value`.

    A setting that came since has its default. ConfigError: the rest does not go with it.
    """
    recorded = json.loads(first.settings)
    tree = settings.model_dump(mode="json")
    changed = []
    for section in _KEPT:
        defaults = type(getattr(settings, section))().model_dump(mode="json")
        for key, default in defaults.items():
            value = recorded.get(section, {}).get(key, default)
            if f"{section}.{key}" not in _FREE and tree[section][key] != value:
                tree[section][key] = value
                changed.append(f"{section}.{key} = {json.dumps(value)}")
    return (Settings.from_json(json.dumps(tree)) if changed else settings), changed
