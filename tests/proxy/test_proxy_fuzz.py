"""The proxy under requests that its own OpenAPI document allows, and forbids: no answer that the document does not name."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from chat_rig import always_says, api_settings, write_tokenizer
from hypothesis import HealthCheck, Phase, given, settings
from proxy_rig import Proxy, running_proxy
from requests import Session
from schemathesis import GenerationMode
from scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker

EXAMPLES = 6
QUICK = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def check(case: Any, reply: Any) -> None:
    documented = case.operation.definition.raw["responses"]
    assert str(reply.status_code) in documented, (reply.status_code, reply.text[:500], case.body)
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["code"] != "hoofprint_error"
        assert error["message"]
        assert reply.status_code not in (429, 503) or "Retry-After" in reply.headers


def fuzz(document: dict[str, Any], base: str, paths: list[str], **arguments: str) -> Counter[int]:
    """Both what the document allows and what it does not, for each operation; how often each status came."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_dict(document)
    with Session() as client:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path not in paths:
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode is GenerationMode.NEGATIVE and not operation.body:
                    continue

                @QUICK
                @given(case=operation.as_strategy(generation_mode=mode))
                def law(case: Any) -> None:
                    case.path_parameters = {**(case.path_parameters or {}), **arguments}
                    reply = case.call(base_url=base, session=client, timeout=60)
                    statuses[reply.status_code] += 1
                    check(case, reply)

                law()
    return statuses


async def opened_token(proxy: Proxy) -> str:
    return str((await proxy.post("/sessions", {"kind": "free"}))[1]["token"])


async def test_no_answer_that_the_document_does_not_name(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.tokens = always_says("well")
    checkpoint = write_tokenizer(tmp_path / "tokenizer")
    configured = api_settings(broker, tmp_path, engine, checkpoint)
    async with running_proxy(configured) as proxy:
        async with proxy.http.get(proxy.base + "/openapi.json") as reply:
            document = await reply.json()
        plain = [path for path in document["paths"] if not path.startswith("/s/")]
        last = [path for path in plain if path.startswith(("/v1/policy", "/v1/rollout", "/v1/engines"))]
        first = [path for path in plain if path not in last]
        statuses = await asyncio.to_thread(fuzz, document, proxy.base, first)
        inside = [path for path in document["paths"] if path.startswith("/s/")]
        assert len(inside) == 10
        for path in inside:
            token = await opened_token(proxy)
            told = await asyncio.to_thread(fuzz, document, proxy.base, [path], token=token)
            assert told[401] + told[404] == 0, path  # the token opens it
            statuses += told
        statuses += await asyncio.to_thread(fuzz, document, proxy.base, last)
        await proxy.post("/v1/rollout/resume", {})
        status, _ = await proxy.post(
            "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
        )
        assert status == 200  # nothing of it has harmed the proxy
        assert proxy.parts.limits.inflight == 0
    assert statuses[200] > EXAMPLES
    assert statuses[400] > EXAMPLES
