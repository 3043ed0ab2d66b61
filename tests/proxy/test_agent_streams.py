"""What every streaming API has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_rig import api_settings, says, segments, write_tokenizer
from proxy_rig import running_proxy
from scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker

USER = {"role": "user", "content": "hello"}
APIS: list[tuple[str, dict[str, Any], bytes, bytes]] = [
    ("/v1/chat/completions", {"messages": [USER]}, b": keep-alive", b"data: [DONE]\n\n"),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 50}, b": keep-alive", b"data: [DONE]\n\n"),
    ("/v1/responses", {"input": "hello"}, b": keep-alive", b"event: response.completed"),
    ("/v1/messages", {"messages": [USER], "max_tokens": 50}, b"event: ping", b"event: message_stop"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(("path", "body", "alive", "end"), APIS, ids=[api[0] for api in APIS])
async def test_a_stream_that_waits_says_that_it_lives_and_ends_as_its_api_wants(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path, path: str, body: dict[str, Any],
    alive: bytes, end: bytes,
) -> None:  # fmt: skip
    engine.tokens = says("spoken words")
    engine.held_at = 0
    settings = api_settings(broker, tmp_path, engine, checkpoint, keepalive_s=0.05)
    seen = b""
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        async with proxy.http.post(opened["base_url"] + path, json={**body, "stream": True}) as reply:
            async for chunk in reply.content.iter_any():
                seen += chunk
                if seen.count(alive) > 1:
                    engine.go.set()  # it lived before there was a token
    assert end in seen
    assert end not in seen.split(alive)[0]
    assert [s.output_ids != b"" for s in await segments(settings)] == [True]
