"""Writers of Avro bodies, compiled: one function per schema, from the event's attributes to its bytes in one join.

As with the readers: the bytes are those of the reference, and what is unusual raises one of `WRITER_GIVES_UP`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import count
from typing import Any

from schemas.avro_numbers import SMALL, SMALL_NUMBERS, Unusual, number_bytes

WRITER_GIVES_UP = (Unusual, IndexError, ValueError, TypeError, AttributeError, OverflowError, struct.error)
Writer = Callable[[Any], bytes]
BRANCH = "b'\\x02'"


def compile_writer(schema: Any, header: bytes) -> Writer:
    """`writer(event)`: the header, then the body."""
    source = _Source(header)
    source.record(schema, "e")
    lines = [
        "def write(e):",
        *("    " + line for line in source.lines),
        f"    return join(({', '.join(source.parts)},))",
    ]
    exec("\n".join(lines), source.names)  # noqa: S102 — our own text, made of our own schemas
    writer: Writer = source.names["write"]
    return writer


class _Source:
    """`parts`: the expressions of the bytes, in order; `lines`: what must be worked out before."""

    def __init__(self, header: bytes) -> None:
        self.lines: list[str] = []
        self.parts = [repr(header)]
        self.names: dict[str, Any] = {
            "join": b"".join, "Unusual": Unusual, "SMALL_NUMBERS": SMALL_NUMBERS, "number_bytes": number_bytes,
            "double": struct.Struct("<d").pack,
        }  # fmt: skip
        self._known: dict[str, Any] = {}
        self._numbers = count()
        self._indent = ""

    def record(self, schema: Any, of: str) -> None:
        self._known[schema["name"]] = schema
        for field in schema["fields"]:
            value = self._keep(f"{of}.{field['name']}")
            self.value(field["type"], value)

    def value(self, schema: Any, of: str) -> None:
        """The variable `of`, as that type."""
        if isinstance(schema, list):
            self._nullable(schema, of)
            return
        if isinstance(schema, str) and schema in self._known:
            schema = self._known[schema]
        kind = schema["type"] if isinstance(schema, dict) else schema
        match kind:
            case "string":
                self._sized(self._keep(f"{of}.encode()"))
            case "bytes":
                self._must(f"type({of}) is bytes")
                self._sized(of)
            case "long":
                self._must(f"type({of}) is int")
                self._number(of)
            case "double":
                self._must(f"type({of}) is float")
                self.parts.append(f"double({of})")
            case "boolean":
                self._must(f"type({of}) is bool")
                self.parts.append(f"(b'\\x01' if {of} else b'\\x00')")
            case "array":
                self._many(of, lambda item: self.value(schema["items"], item))
            case "map":
                self._many(f"{of}.items()", lambda pair: self._pair(schema["values"], pair))
            case "record":
                self.record(schema, of)
            case _:
                raise NotImplementedError(f"no compiled writer of {kind}")

    def _sized(self, of: str) -> None:
        self._number(self._keep(f"len({of})"))
        self.parts.append(of)

    def _number(self, of: str) -> None:
        self.parts.append(f"(SMALL_NUMBERS[{of}] if 0 <= {of} < {SMALL} else number_bytes({of}))")

    def _pair(self, schema: Any, pair: str) -> None:
        key, value = self._keep(f"{pair}[0].encode()"), self._keep(f"{pair}[1]")
        self._sized(key)
        self.value(schema, value)

    def _nullable(self, branches: list[Any], of: str) -> None:
        null, other = branches
        if null != "null":
            raise NotImplementedError("a union that does not begin with null")
        made = self._name()
        self._add(f"if {of} is None:", f"    {made} = b'\\x00'", "else:")
        self._add(f"    {made} = {self._block(lambda: self.value(other, of), first=BRANCH)}")
        self.parts.append(made)

    def _many(self, of: str, one: Callable[[str], None]) -> None:
        """One block, and the end of blocks; nothing at all is the end alone."""
        made, item = self._name(), self._name()
        self._add(f"{made} = []", f"for {item} in {of}:")
        self._add(f"    {made}.append({self._block(lambda: one(item))})")
        self._add(f"if {made}:", f"    {made} = (number_bytes(len({made})), *{made})")
        self.parts.append(f"join({made}), b'\\x00'")

    def _block(self, make: Callable[[], None], first: str | None = None) -> str:
        """Lines one step further in, and the expression of what they make."""
        outer, self.parts = self.parts, [first] if first else []
        self._indent += "    "
        make()
        self._indent = self._indent[4:]
        made, self.parts = f"join(({', '.join(self.parts)},))", outer
        return made

    def _must(self, condition: str) -> None:
        self._add(f"if not ({condition}):", "    raise Unusual('another type')")

    def _keep(self, expression: str) -> str:
        name = self._name()
        self._add(f"{name} = {expression}")
        return name

    def _name(self) -> str:
        return f"v{next(self._numbers)}"

    def _add(self, *lines: str) -> None:
        self.lines += [self._indent + line for line in lines]
