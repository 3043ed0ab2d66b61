"""Text of token ids, when the checkpoint directory holds a `tokenizer.json` (read by `tokenizers`, not
`transformers`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stack.engine.generation import Generation

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAIL_TOKENS = 16
"""Tokens before the newest that may hold the start of a stop string; longer stop strings look further
back."""


class Text:
    """Encodes prompts, decodes outputs, finds stop strings. Without a tokenizer every answer is None."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Tokenizer | None = None
        file = directory / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the tokenizer adds; needs a tokenizer."""
        assert self._tokenizer is not None
        return list(self._tokenizer.encode(text).ids)

    def output(self, generation: Generation, end: int) -> str | None:
        """Text of the first `end` output tokens; what ended the generation is cut off, unless
        `no_stop_trim`."""
        if self._tokenizer is None:
            return None
        sampling = generation.sampling
        ids = generation.output_ids[:end]
        reason = generation.finish_reason or {}
        ended = (
            reason.get("type") == "stop" and end == len(generation.output_ids) and not sampling.no_stop_trim
        )
        matched = reason.get("matched")
        if ended and isinstance(matched, int):
            ids = ids[:-1]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens))
        return text[: text.find(matched)] if ended and isinstance(matched, str) and matched in text else text

    def match_stop(self, generation: Generation) -> str | None:
        """The stop string that the newest token has completed, if any."""
        if self._tokenizer is None:
            return None
        longest = max(map(len, generation.sampling.stop))
        ids = generation.output_ids[-(_TAIL_TOKENS + longest) :]
        tail = self._tokenizer.decode(ids, skip_special_tokens=generation.sampling.skip_special_tokens)
        return next((stop for stop in generation.sampling.stop if stop in tail), None)
