"""A reply's text in its parts: reasoning (`<think>…</think>`) and content; whole, and as it grows. Pure.

Templates of reasoning models either let the model open the block or open it in the prompt (`inside`). Held back of a
growing text: half a tag, white space at a part's end, and everything from a tool call on. Invariant: what was shown of
a part is a prefix of its final text, as long as the final text keeps what came before.
"""

from __future__ import annotations

from typing import Literal

Part = Literal["reasoning", "content"]
THINK, END_THINK = "<think>", "</think>"


def split_reply(text: str, *, thinks: bool, inside: bool) -> tuple[str, str]:
    """Reasoning and content. Reasoning that was cut off before its end is all reasoning."""
    if not thinks:
        return "", text
    head = text.lstrip()
    if head.startswith(THINK):
        head = head[len(THINK) :]
    elif not inside:
        return "", text
    reasoning, _, content = head.partition(END_THINK)
    return reasoning.strip(), content.lstrip()


class SectionStream:
    """`feed` takes text that is certain and gives what may be shown; `finish` gives the rest of the final parts."""

    def __init__(self, *, thinks: bool, inside: bool, marker: str | None) -> None:
        self._state: Literal["undecided", "reasoning", "content", "held"] = (
            "reasoning" if thinks and inside else "undecided" if thinks else "content"
        )
        self._marker = marker
        self._buffer = ""
        self._trim = self._state == "reasoning"
        self._past_tag = False
        self._shown: dict[Part, str] = {"reasoning": "", "content": ""}

    def feed(self, text: str) -> list[tuple[Part, str]]:
        """What may be shown now."""
        self._buffer += text
        shown: list[tuple[Part, str]] = []
        if self._state == "undecided":
            self._decide()
        if self._state == "reasoning" and self._opened():
            self._take("reasoning", END_THINK, "content", shown)
        if self._state == "content":
            self._take("content", self._marker, "held", shown)
        return shown

    def finish(self, reasoning: str, content: str) -> list[tuple[Part, str]]:
        """The rest; nothing of a part whose final text went another way than what was shown."""
        rest: list[tuple[Part, str]] = []
        parts: tuple[tuple[Part, str], ...] = (("reasoning", reasoning), ("content", content))
        for part, final in parts:
            known = self._shown[part]
            if len(final) > len(known) and final.startswith(known):
                rest.append((part, final[len(known) :]))
                self._shown[part] = final
        return rest

    def _decide(self) -> None:
        head = self._buffer.lstrip()
        if head.startswith(THINK):
            self._state, self._trim = "reasoning", True
            self._buffer, self._past_tag = head[len(THINK) :], True
        elif not THINK.startswith(head):
            self._state = "content"

    def _opened(self) -> bool:
        """Past the opening tag: a model may open the block again that its prompt has opened."""
        head = self._buffer.lstrip()
        if self._past_tag or not head:
            return True
        if head.startswith(THINK):
            self._buffer = head[len(THINK) :]
        self._past_tag = not THINK.startswith(head) or head == THINK
        return self._past_tag

    def _take(
        self,
        part: Part,
        tag: str | None,
        then: Literal["content", "held"],
        shown: list[tuple[Part, str]],
    ) -> None:
        text, found, rest = self._buffer.partition(tag) if tag else (self._buffer, "", "")
        certain = text if found else text[: len(text) - _overlap(text, tag)]
        if self._trim:
            certain = certain.lstrip()
        visible = certain.rstrip()
        if visible:
            shown.append((part, visible))
            self._shown[part] += visible
            self._trim = False
        if found:
            self._buffer, self._state, self._trim = rest, then, True
        elif visible or self._trim:
            self._buffer = certain[len(visible) :] + text[len(text) - _overlap(text, tag) :]


def _overlap(text: str, tag: str | None) -> int:
    """How much of a tag's beginning the text ends with."""
    if not tag:
        return 0
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
