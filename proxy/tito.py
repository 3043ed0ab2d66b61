"""Token-in token-out for chat: the tokens an engine produced are never encoded again; a turn encodes only what it appends.

The appended messages are rendered behind a stand-in assistant message, so that the cost of a turn does not grow with its
history; what follows the stand-in is the end of that message, the new messages and the generation prompt. Where the history
is small, the full rendering must end in the same text. A template that does not render so gets a new lineage
(`incremental_tokenization_failed`), and so does one that takes the reasoning out of earlier answers (`history_rewrite`): what
the model would read is not what the lineage has. Tokens that encoding the last answer anew would change are counted.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from proxy.control_view import ControlView
from proxy.markup import Markup, Message
from proxy.registry import EngineRegistry
from proxy.routing import Reason
from proxy.stop_watch import Decode
from schemas.errors import BadRequest

log = structlog.get_logger(__name__)

_STAND_IN = "\u2042stand-in\u2042"
_THOUGHT = "\u2042thought\u2042"
_ASKED: Message = {"role": "user", "content": "."}
_VERIFY_CHARACTERS = 8_000


class TemplateCannot(Exception):
    """The turn cannot be appended: `reason` of the new lineage."""

    def __init__(self, message: str, reason: Reason = "incremental_tokenization_failed") -> None:
        super().__init__(message)
        self.reason = reason


class Appended(NamedTuple):
    """What a turn adds to its lineage, and how many tokens encoding its parent's answer anew would change."""

    ids: list[int]
    mismatch: int


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # without the bookkeeping that transformers does at every call
            self._fast.no_truncation()
            self._fast.no_padding()
        added = {token.content: bool(token.special) for token in tokenizer.added_tokens_decoder.values()}
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._markup = Markup(added)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.thinks = "</think>" in str(tokenizer.chat_template)

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
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of output tokens, special tokens left out."""
        return self._text(ids, skip=True)

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, as it is."""
        return self._text(ids, skip=False)

    def token_text(self, token: int) -> str:
        """Text of one token, as it is."""
        return self._text([token], skip=False)

    def _text(self, ids: Sequence[int], *, skip: bool) -> str:
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=skip))
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        )

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """Ids of a whole conversation. BadRequest: the template refuses it."""
        shielded = self._markup.shield(messages, tools)
        return self._ids(self.render(shielded.messages, shielded.tools, options), shielded.mark)

    def append(
        self, kept: Sequence[int], answered: int, known: int, messages: Sequence[Message], tools: Sequence[Any] | None,
        options: Mapping[str, Any],
    ) -> Appended:  # fmt: skip
        """What `messages[known:]` add behind `kept`, which ends with `answered` tokens of the engine. TemplateCannot."""
        small = sum(len(str(message.get("content"))) for message in messages) <= _VERIFY_CHARACTERS
        system = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0)
        # a long history is not rendered, so nobody has to look through it
        needed = messages if small else [*messages[:system], *messages[known - 1 :]]
        shielded = self._markup.shield(needed, tools)
        view = _View(
            self, shielded.messages, shielded.tools, options, system, len(needed) - len(messages) + known,
            thinking=_last_thinking(messages[:known]), whole=small,
        )  # fmt: skip
        tail = view.tail()
        view.check(tail)
        ids = self._ids(tail, shielded.mark)
        answer = kept[len(kept) - answered :]
        if ids and kept and ids[0] == kept[-1] and ids[0] in self._added:
            ids, answer = ids[1:], answer[: len(answer) - 1]  # the engine ended the turn as the template does
        before, after = (self._ids(text, shielded.mark) for text in view.window(tail))
        return Appended(ids, changed_tokens([*before, *answer], after))

    def _ids(self, text: str, mark: str) -> list[int]:
        if not mark:
            return self.encode(text)
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # some templates write JSON in ASCII
        return [i for piece in text.split(mark) for i in self.encode(piece)]


class _View:
    """The renderings that one turn needs, all but one of them short."""

    def __init__(
        self, tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Any] | None,
        options: Mapping[str, Any], system: int, known: int, *, thinking: Message | None, whole: bool,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._messages = messages
        self._tools = tools
        self._options = options
        self._thinking = thinking
        self._whole = whole
        self._answer = messages[known - 1]
        self._appended = messages[known:]
        self._head = [*messages[:system], _ASKED]

    def tail(self) -> str:
        """Text behind the answer: its end, the appended messages, the generation prompt."""
        plain: Message = {"role": "assistant", "content": _STAND_IN}
        calls = self._answer.get("tool_calls")
        if calls:
            try:
                return self._behind_calls(plain, {**plain, "tool_calls": calls})
            except TemplateCannot:
                pass  # it may not render content beside calls, or want no calls at all
        return self._behind([plain, *self._appended])

    def _behind_calls(self, plain: Message, calling: Message) -> str:
        """Some templates look from a result back to its call, so the stand-in has the calls, too."""
        end = self._behind([plain], prompt=False)
        calls = self._behind([calling], prompt=False)
        whole = self._behind([calling, *self._appended])
        if not calls.endswith(end) or not whole.startswith(calls):
            raise TemplateCannot("the template renders calls in another way when something follows")
        return end + whole[len(calls) :]

    def _behind(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        text = self._render([*self._head, *messages], self._tools, prompt=prompt)
        if text.count(_STAND_IN) != 1:  # more than one: a message has that very text
            raise TemplateCannot("the template drops or rewrites assistant content")
        return text.partition(_STAND_IN)[2]

    def check(self, tail: str) -> None:
        """TemplateCannot: the full rendering ends in another way, or lacks reasoning that the lineage has."""
        if self._thinking is not None and _THOUGHT not in self._render(
            [*self._head, self._thinking, *self._appended], self._tools
        ):
            raise TemplateCannot("the template takes reasoning out of history", "history_rewrite")
        if self._whole and not self._render(self._messages, self._tools).endswith(tail):
            raise TemplateCannot("the full rendering ends in another way")

    def window(self, tail: str) -> tuple[str, str]:
        """The prompt of the answer, and prompt with answer as history has it: short, for comparison."""
        whole = self._render([_ASKED, self._answer, *self._appended], None)
        return self._render([_ASKED], None), whole.removesuffix(tail)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = True
    ) -> str:
        try:
            return self._tokenizer.render(messages, tools, self._options, prompt=prompt)
        except BadRequest as refused:
            raise TemplateCannot(refused.message) from refused


def _last_thinking(messages: Sequence[Message]) -> Message | None:
    """A stand-in for the last answer with reasoning since the user spoke."""
    for message in reversed(messages):
        if message["role"] == "user":
            return None
        thinking = _thinking(message)
        if thinking is not None:
            return thinking
    return None


def _thinking(message: Message) -> Message | None:
    """A stand-in with reasoning, where the message has any."""
    if message["role"] != "assistant":
        return None
    if str(message.get("reasoning_content") or "").strip():
        return {"role": "assistant", "content": _STAND_IN, "reasoning_content": _THOUGHT}
    before, found, _ = str(message.get("content") or "").partition("</think>")
    if not found or not before.replace("<think>", "").strip():
        return None
    return {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_STAND_IN}"}


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
        self._decoder: Any = None

    async def get(self) -> ChatTokenizer:
        """BadRequest: no checkpoint directory has a tokenizer with a chat template."""
        if self._loaded is None:
            async with self._loading:
                if self._loaded is None:
                    self._loaded = await asyncio.to_thread(self._load)
        return self._loaded

    async def decode(self, ids: Sequence[int], *, skip_special: bool) -> str | None:
        """Text of tokens; None where no checkpoint directory has a tokenizer."""
        decode = await self.decoder(skip_special=skip_special)
        return None if decode is None else decode(ids)

    async def decoder(self, *, skip_special: bool) -> Decode | None:
        """The light half of the tokenizer; None where no checkpoint directory has one."""
        if self._decoder is None:
            self._decoder = await asyncio.to_thread(self._load_decoder)
        tokenizer = self._decoder
        return (lambda ids: str(tokenizer.decode(list(ids), skip_special))) if tokenizer else None

    def _load_decoder(self) -> Any:
        from tokenizers import Tokenizer

        file = next(
            (d / "tokenizer.json" for d in self._candidates() if (d / "tokenizer.json").is_file()), None
        )
        return Tokenizer.from_file(str(file)) if file is not None else False

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
        if (
            gc.get_freeze_count()
        ):  # a process that has put its modules aside: transformers brings more than all sessions
            gc.freeze()
        log.info("tokenizer_loaded", directory=str(directory), size=len(tokenizer))
        return ChatTokenizer(tokenizer)

    def _candidates(self) -> list[Path]:
        newest = self._control.newest()
        places = [newest[1] if newest else None, self._model]
        places += [path for e in self._registry.engines for path in (e.tokenizer_path, e.model_path)]
        return [Path(place) for place in places if place]
