"""What the process brings into memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from chat_rig import always_says, api_settings, write_tokenizer
from proxy_process import ProxyProcess, free_port
from scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker


async def test_a_chat_needs_a_tokenizer_and_not_what_trains(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    checkpoint = write_tokenizer(tmp_path / "tokenizer")
    engine.tokens = always_says("well")
    process = ProxyProcess(api_settings(broker, tmp_path, engine, checkpoint, port=free_port()), tmp_path)
    await asyncio.to_thread(process.start)
    try:
        body = {"model": "policy", "messages": [{"role": "user", "content": "how"}]}
        async with (
            aiohttp.ClientSession() as http,
            http.post(process.base + "/v1/chat/completions", json=body) as reply,
        ):
            assert (await reply.json())["choices"][0]["message"]["content"] == "well"
        loaded = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)
    finally:
        process.kill()
    assert "tokenizers" in loaded
    assert "libtorch" not in loaded
