"""A tokenizer whose template knows reasoning, scripts for the engine in its tokens, and what the log has afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy_rig import log_of, settings_for
from scripted_engine import ScriptedEngine
from tiny_chat import TEMPLATE, tiny_tokenizer

from schemas.events import TokenSegment
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS

TOKENIZER = tiny_tokenizer()
TOKENIZER.chat_template = TEMPLATE.replace(
    "{{ message.content }}{% for call",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call",
)
THOUGHT = "<think>\nlet me see\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    '<tool_call>\n{"name": "look", "arguments": {"at": "y"}}\n</tool_call>'
)


def write_tokenizer(directory: Path) -> Path:
    TOKENIZER.save_pretrained(directory)
    return directory


def says(*replies: str) -> Callable[[list[int]], list[int]]:
    """The engine's script: the replies in turn, each closed by the end mark."""
    left = list(replies)

    def tokens(_prompt: list[int]) -> list[int]:
        return [*TOKENIZER.encode(left.pop(0), add_special_tokens=False), TOKENIZER.eos_token_id]

    return tokens


def always_says(reply: str) -> Callable[[list[int]], list[int]]:
    """The same reply to everybody."""
    tokens = [*TOKENIZER.encode(reply, add_special_tokens=False), TOKENIZER.eos_token_id]
    return lambda _prompt: tokens


def api_settings(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path, **proxy: Any
) -> Settings:
    return settings_for(
        broker,
        tmp_path,
        [engine.url],
        engine={"model": str(checkpoint)},
        proxy={"engines": [engine.url], **proxy},
    )


async def segments(settings: Settings) -> list[TokenSegment]:
    return await asyncio.to_thread(log_of, settings, SEGMENTS, TokenSegment)


def text_of(*parts: bytes) -> str:
    return str(TOKENIZER.decode([i for part in parts for i in ids_of(part).tolist()]))
