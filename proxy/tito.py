"""Token-in token-out for chat: the tokens an engine produced are never encoded again; a turn encodes only what it appends.

The appended messages are rendered behind a stand-in assistant message, so that the cost of a turn does not grow with its
history; what follows the stand-in's content is the end of that message, the new messages and the generation prompt. Where
the history is small the result is verified against the full rendering, and the tokens a full encoding would have
changed are counted. A template that does not render so gets a new lineage (`incremental_tokenization_failed`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from proxy.control_view import ControlView
from proxy.registry import EngineRegistry
from schemas.errors import BadRequest

log = structlog.get_logger(__name__)

Message = dict[str, Any]
_STAND_IN = "\u2042stand-in\u2042"
_VERIFY_CHARACTERS = 20_000


class TemplateCannot(Exception):
    """The template does not let the appended messages be rendered on their own."""


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        *,
        prompt: bool = True,
    ) -> str:
        """Text of a conversation. BadRequest: the template refuses it."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False,
                add_generation_prompt=prompt, **options,
            )  # fmt: skip
        except (TemplateError, TypeError, KeyError, ValueError) as refused:
            raise BadRequest(
                f"the chat template refuses the messages: {refused}", field="messages"
            ) from refused
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of output tokens, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Text of one token, as it is."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def suffix(
        self,
        head: Sequence[Message],
        appended: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        last_token: int | None,
    ) -> list[int]:
        """Ids behind an assistant turn: its end (but what the engine produced of it, `last_token`), `appended`, the prompt.

        `head`: leading system messages. TemplateCannot.
        """  # fmt: skip
        base = [*head, {"role": "user", "content": "."}, {"role": "assistant", "content": _STAND_IN}]
        try:
            text = self.render([*base, *appended], tools, options)
        except BadRequest as refused:
            raise TemplateCannot(refused.message) from refused
        _, found, tail = text.rpartition(_STAND_IN)
        if not found:
            raise TemplateCannot("the template drops or rewrites assistant content")
        ids = self.encode(tail)
        return ids[1:] if ids and ids[0] == last_token else ids

    def verify(
        self,
        kept: Sequence[int],
        tail: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
    ) -> int:
        """Tokens that a full encoding of a small history changes. TemplateCannot: it does not end as the tail does."""
        if sum(len(str(message.get("content"))) for message in messages) > _VERIFY_CHARACTERS:
            return 0
        full = self.encode(self.render(messages, tools, options))
        if full[-len(tail) :] != list(tail) and not _ends_alike(self, full, tail):
            raise TemplateCannot("the full rendering ends in another way")
        return changed_tokens([*kept, *tail], full)


def _ends_alike(tokenizer: ChatTokenizer, full: Sequence[int], tail: Sequence[int]) -> bool:
    """Neighbouring text may merge with the first tokens of the tail; the text behind must be the same."""
    wanted = "".join(map(tokenizer.token_text, tail)).strip()
    return "".join(map(tokenizer.token_text, full[-len(tail) - 8 :])).strip().endswith(wanted)


def changed_tokens(kept: Sequence[int], full: Sequence[int]) -> int:
    """Tokens of `kept` outside the common head and tail of both."""
    shorter = min(len(kept), len(full))
    head = 0
    while head < shorter and kept[head] == full[head]:
        head += 1
    tail = 0
    while tail < shorter - head and kept[-1 - tail] == full[-1 - tail]:
        tail += 1
    return max(len(kept), len(full)) - head - tail


class Tokenizers:
    """The run's tokenizer, loaded at the first chat request (transformers takes seconds) and kept: versions share it."""

    def __init__(self, registry: EngineRegistry, control: ControlView, model: str) -> None:
        self._registry = registry
        self._control = control
        self._model = model
        self._loaded: ChatTokenizer | None = None
        self._loading = asyncio.Lock()

    async def get(self) -> ChatTokenizer:
        """BadRequest: no checkpoint directory has a tokenizer with a chat template."""
        if self._loaded is None:
            async with self._loading:
                if self._loaded is None:
                    self._loaded = await asyncio.to_thread(self._load)
        return self._loaded

    def _load(self) -> ChatTokenizer:
        directory = next((d for d in self._candidates() if (d / "tokenizer_config.json").is_file()), None)
        if directory is None:
            raise BadRequest(
                "the served checkpoint has no tokenizer: use /generate with token ids", field="messages"
            )
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        if not tokenizer.chat_template:
            raise BadRequest("the served checkpoint's tokenizer has no chat template", field="messages")
        log.info("tokenizer_loaded", directory=str(directory), size=len(tokenizer))
        return ChatTokenizer(tokenizer)

    def _candidates(self) -> list[Path]:
        newest = self._control.newest()
        places = [newest[1] if newest else None, self._model]
        places += [path for e in self._registry.engines for path in (e.tokenizer_path, e.model_path)]
        return [Path(place) for place in places if place]
