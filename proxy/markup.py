"""Text that looks like a tokenizer's added tokens stays text. Pure.

A tool result may hold `<|im_end|>`, and a tokenizer would make the control token of it: the conversation would go on as its
author wants. So, before a template renders the messages, a mark is put behind the first character of every such place; after the
rendering, the text is encoded in the pieces between the marks, none of which holds an added token that the template did not
write. Results of tools are shielded from every added token; other texts from control tokens alone, because models and their
prompts do write `<think>` or `<tool_call>`. Invariant: without the marks the rendering is what it would have been.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

Message = dict[str, Any]
_MARKS = [chr(code) for code in range(0xE000, 0xE020)]
"""Private use: no template touches them."""


class Shielded(NamedTuple):
    """Messages and tools to render. `mark` "": nothing had to be shielded."""

    messages: list[Message]
    tools: list[Any] | None
    mark: str


class Markup:
    """`added`: text of each added token, and whether it is a control token."""

    def __init__(self, added: Mapping[str, bool]) -> None:
        breakable = sorted(text for text in added if len(text) > 1)
        self._texts = breakable
        self._first = {text[0] for text in breakable}
        self._all = _anywhere(breakable)
        self._control = _anywhere([text for text in breakable if added[text]])

    def shield(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Shielded:
        """The same where no text looks like an added token."""
        given = list(messages), list(tools) if tools else None
        raw = orjson.dumps(given, default=str).decode()
        if not any(letter in raw for letter in self._first) or not any(text in raw for text in self._texts):
            return Shielded(*given, "")
        mark = next(m for m in _MARKS if m not in raw)
        shielded = [self._message(message, mark) for message in given[0]]
        return Shielded(shielded, _deep(given[1], self._control, mark), mark)

    def _message(self, message: Message, mark: str) -> Message:
        pattern = self._all if message.get("role") == "tool" else self._control
        return {
            key: value if key in ("role", "tool_call_id", "name") else _deep(value, pattern, mark)
            for key, value in message.items()
        }


def _anywhere(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Every place where one of them begins, overlapping ones too."""
    if not texts:
        return None
    return re.compile("(?=" + "|".join(map(re.escape, texts)) + ")(.)", re.DOTALL)


def _deep(value: Any, pattern: re.Pattern[str] | None, mark: str) -> Any:
    if pattern is None:
        return value
    if isinstance(value, str):
        return pattern.sub(lambda found: found.group(1) + mark, value)
    if isinstance(value, list):
        return [_deep(item, pattern, mark) for item in value]
    if isinstance(value, dict):
        return {_deep(key, pattern, mark): _deep(item, pattern, mark) for key, item in value.items()}
    return value
