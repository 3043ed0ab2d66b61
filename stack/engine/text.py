"""Text of token ids, when the checkpoint directory holds a `tokenizer.json`.

It is read by `tokenizers`, not `transformers`, whose import costs seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stack.engine.generation import Generation

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAIL_TOKENS = 16
"""Tokens before the newest that may hold the start of a stop string, beside one for each of its characters."""


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
        """Text of the first `end` output tokens; what ended the generation is cut off unless `no_stop_trim`."""
        if self._tokenizer is None:
            return None
        sampling, reason = generation.sampling, generation.finish_reason
        final = reason is not None and end == len(generation.output_ids)
        matched = (
            reason.get("matched") if reason is not None and final and not sampling.no_stop_trim else None
        )
        ids = generation.output_ids[: end - isinstance(matched, int)]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens))
        if isinstance(matched, str):
            return text.split(matched, 1)[0]
        # A replacement mark at the end is the first bytes of a character whose rest is still to come.
        return text if final else text.rstrip("\ufffd")

    def match_stop(self, generation: Generation) -> str | None:
        """The stop string that the newest token has completed, if any."""
        if self._tokenizer is None:
            return None
        longest = max(map(len, generation.sampling.stop))
        ids = generation.output_ids[-(_TAIL_TOKENS + longest) :]
        tail = self._tokenizer.decode(ids, skip_special_tokens=generation.sampling.skip_special_tokens)
        return next((stop for stop in generation.sampling.stop if stop in tail), None)
