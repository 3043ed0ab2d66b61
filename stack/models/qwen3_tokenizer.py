"""The real Qwen3 tokenizer with its chat template, made once per user from two PyPI packages.

`dashscope` carries the ranks of Qwen's byte-pair encoding in tiktoken's form, `trl` the chat templates (both Apache-2.0). The
ranks are turned into merges: a token is the merge of the two pieces that encoding its bytes with the lower ranks alone ends
in. What comes out is a standard tokenizer directory of 151,669 ids, without weights.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Final

from stack.models.package_cache import install, made_once

REQUIREMENTS: Final = Path(__file__).with_name("qwen3_tokenizer.requirements.txt")
NAME: Final = "qwen3-tokenizer"
RANKS: Final = Path("dashscope/resources/qwen.tiktoken")
TEMPLATE: Final = Path("trl/chat_templates/qwen3.jinja")
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MARKUP: Final = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""Added tokens that are not special: they show in decoded text."""


def ensure_qwen3_tokenizer() -> Path:
    """The tokenizer directory, made if this user never did.

    Raises TransportError where the packages cannot be fetched, ConfigError where no installer is found.
    """
    return made_once(NAME, _make)


def _make(scratch: Path) -> Path:
    install(REQUIREMENTS, scratch / "packages")
    tokenizer = _tokenizer(_read_ranks(scratch / "packages" / RANKS))
    tokenizer.chat_template = (scratch / "packages" / TEMPLATE).read_text()
    tokenizer.save_pretrained(scratch / "tokenizer")
    return scratch / "tokenizer"


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks = {}
    for line in file.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def _tokenizer(ranks: dict[bytes, int]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    merges = [(_spell(a, letters), _spell(b, letters)) for a, b in _merges(ranks)]
    core = Tokenizer(models.BPE(vocab={_spell(t, letters): r for t, r in ranks.items()}, merges=merges))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    made: Any = PreTrainedTokenizerFast
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return made(tokenizer_object=core, clean_up_tokenization_spaces=False, **marks)


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """One pair per token of several bytes, in the order of the ranks."""
    return [_halves(token, rank, ranks) for token, rank in ranks.items() if len(token) > 1]


def _halves(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """What the bytes of a token are just before the token itself is merged."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [(ranks.get(pieces[i] + pieces[i + 1], rank), i) for i in range(len(pieces) - 1)]
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces[0], pieces[1]


def _byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte, which byte-level vocabularies are spelled in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


def _spell(token: bytes, letters: list[str]) -> str:
    return "".join(letters[byte] for byte in token)
