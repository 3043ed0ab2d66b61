"""Readers of Avro bodies, compiled: one straight-line function per schema, from bytes to the event's class without a record in
between. Half the time of fastavro and msgspec together, and the assembler decodes every segment.

A compiled reader is a shortcut, never a second opinion: what it gives is what the reference gives (tests compare them, damaged
bytes included), and on anything unusual it raises one of `READER_GIVES_UP`, so that the reference decides and words the error.
"""

from __future__ import annotations

import inspect
import struct
import types
import typing
from collections.abc import Callable
from itertools import count
from typing import Any, get_args, get_origin

import msgspec

from schemas.avro_numbers import ONE_BYTE, Unusual, number_at, size_at

READER_GIVES_UP = (Unusual, IndexError, ValueError, TypeError, OverflowError, struct.error)
Reader = Callable[[bytes, int], Any]


def compile_reader(schema: Any, event_type: type[msgspec.Struct], *, whole: bool = True) -> Reader:
    """`reader(raw, start)`: the event whose body is all of `raw` from `start` on. Not `whole`: something may follow, and the
    place behind the event is given with it.

    `schema`: JSON of one record, named types defined where they are first used. Fields that the class does not have are
    passed over, fields that the schema does not have keep their defaults.
    """
    source = _Source()
    value = source.record(schema, event_type)
    end = ["if b != len(raw):", "    raise Unusual('not the whole of it')", f"return {value}"]
    lines = ["def read(raw, b):"] + [
        "    " + line for line in source.lines + (end if whole else [f"return {value}, b"])
    ]
    exec("\n".join(lines), source.names)  # noqa: S102 — our own text, made of our own schemas
    reader: Reader = source.names["read"]
    return reader


class _Source:
    """The function's text. Every method adds the lines that read one thing at `b`, and gives the expression of its value."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "Unusual": Unusual, "number_at": number_at, "size_at": size_at, "ONE_BYTE": ONE_BYTE,
            "double": struct.Struct("<d").unpack_from,
        }  # fmt: skip
        self._known: dict[str, Any] = {}
        self._numbers = count()
        self._indent = ""

    def record(self, schema: Any, struct_type: type[Any] | None) -> str:
        """An object of the class; None where the class knows nothing of it."""
        self._known[schema["name"]] = schema
        hints = typing.get_type_hints(struct_type) if struct_type else {}
        values = {
            field["name"]: self.value(field["type"], hints.get(field["name"])) for field in schema["fields"]
        }
        if struct_type is None:
            return "None"
        in_order = list(values) == _positional(struct_type)
        arguments = [
            value if in_order else f"{name}={value}" for name, value in values.items() if name in hints
        ]
        return self._keep(f"{self._named(struct_type)}({', '.join(arguments)})")

    def value(self, schema: Any, hint: Any) -> str:
        """Of any type."""
        if isinstance(schema, list):
            return self._nullable(schema, hint)
        if isinstance(schema, str) and schema in self._known:
            schema = self._known[schema]
        kind = schema["type"] if isinstance(schema, dict) else schema
        match kind:
            case "string":
                return self._text(hint)
            case "bytes":
                self._sized()
                return self._keep("raw[a:b]")
            case "long":
                return self._number()
            case "double":
                value = self._keep("double(raw, b)[0]")
                self._add("b += 8")
                return value
            case "boolean":
                self._add("n = raw[b]", "b += 1", "if n > 1:", "    raise Unusual('no boolean')")
                return self._keep("n == 1")
            case "array":
                return self._many("[]", schema["items"], get_args(hint)[0] if hint else None)
            case "map":
                return self._many("{}", schema["values"], get_args(hint)[1] if hint else None)
            case "record":
                return self.record(schema, hint)
        raise NotImplementedError(f"no compiled reader of {kind}")

    def _sized(self) -> None:
        """The bytes are `raw[a:b]` then. A length over 63 has two bytes and more, one below 0 is odd."""
        self._add(
            "n = raw[b]",
            "if n & 129:",
            "    a, b = size_at(raw, b)",
            "else:",
            "    a = b + 1",
            "    b = a + (n >> 1)",
        )

    def _text(self, hint: Any) -> str:
        self._sized()
        text = self._keep("raw[a:b].decode()")
        if get_origin(hint) is typing.Literal:
            allowed = self._named(frozenset(get_args(hint)))
            self._add(f"if {text} not in {allowed}:", "    raise Unusual('another value')")
        return text

    def _number(self) -> str:
        number = self._name()
        self._add(
            "n = raw[b]", "if n & 128:", f"    {number}, b = number_at(raw, b)", "else:", "    b += 1",
            f"    {number} = ONE_BYTE[n]",
        )  # fmt: skip
        return number

    def _nullable(self, branches: list[Any], hint: Any) -> str:
        null, other = branches
        if null != "null":
            raise NotImplementedError("a union that does not begin with null")
        inner = next((a for a in get_args(hint) if a is not types.NoneType), None)
        value = self._name()
        self._add("n = raw[b]", "b += 1", "if n == 0:", f"    {value} = None", "elif n == 2:")
        with_more = self._indent
        self._indent += "    "
        self._add(f"{value} = {self.value(other, inner)}")
        self._indent = with_more
        self._add("else:", "    raise Unusual('no such branch')")
        return value

    def _block_size(self) -> None:
        """As `n`, which is in use until the items begin, and again behind them."""
        self._sized()
        self._add("b, n = a, b - a")

    def _many(self, empty: str, item: Any, hint: Any) -> str:
        """Blocks of items with their count in front; a block that tells its size as well (a negative count) is unusual."""
        found, left = self._name(), self._name()
        self._add(f"{found} = {empty}")
        self._block_size()
        self._add("while n:", f"    for {left} in range(n):")
        before = self._indent
        self._indent += "        "
        if empty == "{}":
            key = self._text(str)
            self._add(f"{found}[{key}] = {self.value(item, hint)}")
        else:
            self._add(f"{found}.append({self.value(item, hint)})")
        self._indent = before
        self._indent += "    "
        self._block_size()
        self._indent = before
        return found if empty == "{}" else self._keep(f"tuple({found})")

    def _keep(self, expression: str) -> str:
        name = self._name()
        self._add(f"{name} = {expression}")
        return name

    def _name(self) -> str:
        return f"v{next(self._numbers)}"

    def _named(self, thing: Any) -> str:
        name = f"K{len(self.names)}"
        self.names[name] = thing
        return name

    def _add(self, *lines: str) -> None:
        self.lines += [self._indent + line for line in lines]


def _positional(struct_type: type[Any]) -> list[str]:
    """Fields that may be given without their names, in order: much faster than with them."""
    parameters = inspect.signature(struct_type).parameters.values()
    return [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
