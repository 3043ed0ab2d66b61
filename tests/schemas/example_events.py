"""An example of every event, filled from its types, and the golden bytes of every released schema.

`python tests/schemas/example_events.py` adds the golden bytes that are missing; it never changes one that is there: bytes
that were released once must stay readable.
"""

from __future__ import annotations

import json
import types
import typing
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from schemas.codec import encode, released_schemas
from schemas.events import EVENT_TYPES, Event, identified

GOLDEN = Path(__file__).parents[1] / "golden" / "events.json"


def example(event_type: type[Event], *, full: bool) -> Event:
    """All fields set (`full`), or all that may be absent absent and lists empty. Every number differs."""
    return identified(_filled(event_type, full, count(1)))


def _filled(struct: type[Any], full: bool, numbers: typing.Iterator[int]) -> Any:
    hints = typing.get_type_hints(struct)
    values = {
        field.name: _value(hints[field.name], field.name, full, numbers)
        for field in msgspec.structs.fields(struct)
        if field.name != "event_id"
    }
    return struct(**values)


def _value(hint: Any, name: str, full: bool, numbers: typing.Iterator[int]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _value(inner, name, full, numbers) if full else None
    if origin is typing.Literal:
        return arguments[-1] if full else arguments[0]
    if origin is tuple:
        return tuple(_value(arguments[0], name, full, numbers) for _ in range(2 if full else 0))
    if origin is dict:
        return {f"{name}-ä": _value(arguments[1], name, full, numbers)} if full else {}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _filled(hint, full, numbers)
    number = next(numbers)
    return {
        str: f"{name}-{number}" if full else "",
        int: number * 1_000_003 if full else -number,
        float: number / 8,
        bool: full,
        bytes: bytes([number % 256, 0, 255]) if full else b"",
    }[hint]


def golden_entries() -> dict[str, dict[str, Any]]:
    """Name to `{hex, event}` for the current schema of every event."""
    newest = {event_type: version for event_type, version, _ in released_schemas()}
    return {
        f"{event_type.__name__}.v{newest[event_type]}.{'full' if full else 'bare'}": {
            "hex": encode(event).hex(),
            "event": msgspec.to_builtins(event),
        }
        for event_type in EVENT_TYPES
        for full in (True, False)
        for event in (example(event_type, full=full),)
    }


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    GOLDEN.write_text(
        json.dumps(golden_entries() | known, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
