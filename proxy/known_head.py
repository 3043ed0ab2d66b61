"""What a session knows of a request's ids already, cut out of the body before it is parsed. Pure.

An agent that speaks tokens sends its whole context with every turn, as JSON numbers, and reading thousands of them costs more
than the rest of a late turn. The session has these tokens, so it can say how they are written; where the body begins its ids
so, only what follows is parsed. Invariant: head and rest are exactly what parsing the whole body would give, whatever the
body holds; a body that is written in another way is not cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from schemas.tokens import ids_of

_KEY = b'"input_ids":'
_MARK = -(2**53)
"""Stands for the head while the rest is parsed; a body that has this number is not cut."""
_MARK_TEXT = b"%d" % _MARK
_LEAST = 256
"""Tokens; less is parsed in no time."""


class Cut(NamedTuple):
    """`head`: tokens as little-endian int32; `text`: how they stand in the body, with the bracket before them. `body`: parsed,
    its `input_ids` those behind the head."""

    head: bytes
    text: bytes
    body: dict[str, Any]


def cut_known(raw: bytes, lineages: Iterable[bytes | bytearray]) -> Cut | None:
    """The body of a request that goes on where one of the lineages ends; None: parse it as it is."""
    key = raw.find(_KEY)
    start = raw.find(b"[", key, key + len(_KEY) + 2) if key >= 0 else -1
    if start < 0 or _MARK_TEXT in raw[:start]:
        return None
    spaced = raw[start : start + 16].find(b", ") > 0
    for tokens in sorted(lineages, key=len, reverse=True):
        if len(tokens) < 4 * _LEAST:
            return None
        text = orjson.dumps(ids_of(bytes(tokens)), option=orjson.OPT_SERIALIZE_NUMPY)[:-1]
        text = text.replace(b",", b", ") if spaced else text
        after = start + len(text)
        if raw.startswith(text, start) and raw[after : after + 1] in (b",", b"]"):
            return _parsed(raw[: start + 1], raw[after:], bytes(tokens), text)
    return None


def _parsed(before: bytes, after: bytes, head: bytes, text: bytes) -> Cut | None:
    if _MARK_TEXT in after:
        return None
    raw = before + _MARK_TEXT + after
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None  # whoever parses the whole says why
    ids = body.get("input_ids") if isinstance(body, dict) else None
    if not isinstance(ids, list) or not ids or ids[0] != _MARK:
        return None  # the ids that were cut are not the request's own
    return Cut(head, text, {**body, "input_ids": ids[1:]})
