"""What a request's fields may hold: said once, checked on the way in and written into the OpenAPI document. Pure.

A kind knows its test, its words and its JSON Schema, so what is refused and what is documented cannot differ. Invariants: a
refusal names the field as its client wrote it (`tools[0].function.name`); null is absence; names that a record does not know
are not looked at; nothing is converted, so a body that passed is the body that came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from schemas.errors import BadRequest

Json = dict[str, Any]


class Kind:
    """Values of one kind. `says`: in words behind "must be"; `schema`: None where the document shall not name the field."""

    def __init__(self, says: str, schema: Json | None, fits: Callable[[Any], bool]) -> None:
        self.says = says
        self.schema = schema
        self._fits = fits

    def check(self, value: object, name: str) -> None:
        """BadRequest names the field."""
        if not self._fits(value):
            self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """BadRequest."""
        raise BadRequest(f"{name} must be {self.says}", field=name)


def _any(_value: object) -> bool:
    return True


FLAG = Kind("true or false", {"type": "boolean"}, lambda value: value is True or value is False)
TEXT = Kind("a string", {"type": "string"}, lambda value: isinstance(value, str))
OBJECT = Kind("an object", {"type": "object"}, lambda value: isinstance(value, dict))
ANYTHING = Kind("anything", {}, _any)


def read_elsewhere(schema: Json) -> Kind:
    """A field that its own reader checks: here it is only documented."""
    return Kind("as documented", schema, _any)


def text(least: int, longest: int) -> Kind:
    """Printable characters on one line, so many of them."""
    return Kind(
        f"a string of {least} to {longest} printable characters",
        {"type": "string", "minLength": least, "maxLength": longest},
        lambda value: isinstance(value, str) and least <= len(value) <= longest and value.isprintable(),
    )


def filled(longest: int) -> Kind:
    """Any characters, and at least one."""
    return Kind(
        f"a string of 1 to {longest} characters",
        {"type": "string", "minLength": 1, "maxLength": longest},
        lambda value: isinstance(value, str) and 1 <= len(value) <= longest,
    )


def choice(*words: str) -> Kind:
    """One of these words."""
    known = frozenset(words)
    return Kind(
        " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}",
        {"type": "string", "enum": list(words)},
        lambda value: isinstance(value, str) and value in known,
    )


def whole(low: int, high: int, *, but: int | None = None) -> Kind:
    """A whole number from `low` to `high`, except `but`."""
    schema: Json = {"type": "integer", "minimum": low, "maximum": high}
    if but is not None:
        schema["not"] = {"const": but}
    return Kind(
        f"a whole number from {low} to {high}" + (f", and not {but}" if but is not None else ""),
        schema,
        lambda value: type(value) is int and low <= value <= high and value != but,
    )


def number(low: float | None = None, high: float | None = None, *, above: bool = False) -> Kind:
    """A number in [low, high], or in (low, high] with `above`. JSON has no infinite ones."""
    if low is None or high is None:
        return Kind("a number", {"type": "number"}, lambda value: type(value) in (int, float))
    return Kind(
        f"a number above {low} and at most {high}" if above else f"a number from {low} to {high}",
        {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high},
        lambda value: type(value) in (int, float) and low <= value <= high and not (above and value == low),
    )


class Refused(Kind):
    """A field that asks for what cannot be had; not in the document. What asks for nothing (false, "", 0, …) passes."""

    def __init__(self, why: str = "cannot be honoured") -> None:
        super().__init__(why, None, lambda value: not value)

    def refuse(self, name: str) -> NoReturn:
        """BadRequest."""
        raise BadRequest(f"{name} {self.says}", field=name)


class ListOf(Kind):
    """A list of so many items of one kind."""

    def __init__(self, items: Kind, least: int = 0, most: int | None = None, says: str = "") -> None:
        bounds = f" of at most {most} items" if most is not None else " that is not empty" if least else ""
        schema: Json = {"type": "array", "items": items.schema, "minItems": least}
        super().__init__(
            says or f"a list{bounds}", schema | ({} if most is None else {"maxItems": most}), _any
        )
        self._items, self._least, self._most = items, least, most

    def check(self, value: object, name: str) -> None:
        """BadRequest names the list, or its item by place."""
        if not isinstance(value, list) or len(value) < self._least:
            self.refuse(name)
        if self._most is not None and len(value) > self._most:
            self.refuse(name)
        for place, item in enumerate(value):
            self._items.check(item, f"{name}[{place}]")


class MapOf(Kind):
    """An object whose values are all of one kind."""

    def __init__(self, values: Kind, says: str) -> None:
        super().__init__(says, {"type": "object", "additionalProperties": values.schema}, _any)
        self._values = values

    def check(self, value: object, name: str) -> None:
        """BadRequest names the object: its keys are the client's own."""
        if not isinstance(value, dict):
            self.refuse(name)
        try:
            for item in value.values():
                self._values.check(item, name)
        except BadRequest:
            self.refuse(name)


class Either(Kind):
    """One of several kinds."""

    def __init__(self, *kinds: Kind, says: str = "") -> None:
        words = says or " or ".join(kind.says for kind in kinds)
        super().__init__(words, {"anyOf": [kind.schema for kind in kinds]}, _any)
        self._kinds = kinds

    def check(self, value: object, name: str) -> None:
        """BadRequest names the field: which of the kinds was meant cannot be known."""
        for kind in self._kinds:
            try:
                kind.check(value, name)
            except BadRequest:
                continue
            return
        self.refuse(name)


class Record(Kind):
    """An object with these fields, and others that nobody looks at. `advice`: fields that are checked, but change nothing."""

    def __init__(
        self, fields: Mapping[str, Kind], required: Iterable[str] = (), advice: Iterable[str] = ()
    ) -> None:
        self.fields = dict(fields)
        self._required = tuple(required)
        self._honoured = self.fields.keys() - set(advice)
        shown = {name: kind.schema for name, kind in self.fields.items() if kind.schema is not None}
        schema: Json = {"type": "object", "properties": shown}
        super().__init__(
            "an object", schema | ({"required": list(self._required)} if self._required else {}), _any
        )

    def check(self, value: object, name: str = "") -> None:
        """A whole body without a name, or a part of one. BadRequest names the field."""
        if not isinstance(value, dict):
            self.refuse(name)
        kinds, where = self.fields, name + "." if name else ""
        for field, given in value.items():
            if given is not None and (kind := kinds.get(field)) is not None:
                kind.check(given, where + field)
        for field in self._required:
            if value.get(field) is None:
                raise BadRequest(f"{where}{field} is required", field=where + field)

    def named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the body says in fields of this record."""
        return {name: value for name, value in body.items() if value is not None and name in self.fields}

    def unknown(self, body: Mapping[str, Any]) -> list[str]:
        """Names in the body that change nothing."""
        return sorted(body.keys() - self._honoured)
