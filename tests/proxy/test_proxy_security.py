"""Keys: who may do what, and that neither they nor what agents say is ever written to a log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from api_calls import APIS
from chat_rig import always_says, api_settings, write_tokenizer
from proxy_process import ProxyProcess, free_port
from proxy_rig import running_proxy, settings_for
from scripted_engine import ScriptedEngine

from proxy.server import CANNOT_WORK, check_exposure
from proxy.tokens_auth import TokenSigner
from schemas.errors import ConfigError, Unauthorized
from schemas.settings_sections import ProxySettings

ADMIN = [
    ("POST", "/sessions"),
    ("POST", "/v1/policy/versions"),
    ("POST", "/v1/rollout/pause"),
    ("POST", "/v1/rollout/resume"),
    ("GET", "/v1/rollout/pause_state"),
]


@pytest.mark.broker
@pytest.mark.parametrize("admin_key", ["", "sesame"])
async def test_a_session_token_never_opens_an_admin_route(
    broker: str, tmp_path: Path, engine: ScriptedEngine, admin_key: str
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"admin_key": admin_key})
    key = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    async with running_proxy(settings) as proxy:
        _, opened = await proxy.post("/sessions", {"kind": "free"}, **key)
        for method, path in ADMIN:
            for header in ({"Authorization": f"Bearer {opened['token']}"}, {"X-Api-Key": opened["token"]}):
                async with proxy.http.request(method, proxy.base + path, json={}, headers=header) as reply:
                    assert (reply.status, (await reply.json())["error"]["code"]) == (401, "unauthorized"), (
                        path
                    )
            async with proxy.http.request(method, proxy.base + path, json={}, headers=key) as reply:
                assert reply.status in (200, 400), path
            if admin_key:
                async with proxy.http.request(method, proxy.base + path, json={}) as reply:
                    assert reply.status == 401, path
        for method, path in ADMIN:  # nor does it by its path
            async with proxy.http.request(
                method, f"{proxy.base}/s/{opened['token']}{path}", json={}
            ) as reply:
                assert reply.status == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    check_exposure(ProxySettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "proxy", ""])
def test_any_other_address_needs_one(host: str) -> None:
    check_exposure(ProxySettings(host=host, admin_key="sesame"))
    with pytest.raises(ConfigError):
        check_exposure(ProxySettings(host=host))


def test_the_process_does_not_start_open_to_the_world(tmp_path: Path) -> None:
    settings = settings_for("127.0.0.1:1", tmp_path, ["http://127.0.0.1:1"], proxy={"host": "0.0.0.0"})
    status, said = ProxyProcess(settings, tmp_path).run_to_its_end()
    assert status == CANNOT_WORK
    assert "proxy.admin_key" in said


@pytest.mark.parametrize("text", ["", ".", "a", "a.b", "a.b.c", "é.ü", "." * 5000, "a" * 5000])
def test_what_nobody_signed_is_no_token(text: str) -> None:
    signer = TokenSigner(b"key", "run")
    assert not signer.issued(text)
    with pytest.raises(Unauthorized):
        signer.read(text)


SECRETS = ("sesame-admin", "wrong-key-4711", "moonstone", "sunstone")


@pytest.mark.broker
async def test_no_key_and_no_payload_is_ever_logged(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.tokens = always_says("the moonstone")
    checkpoint = write_tokenizer(tmp_path / "tokenizer")
    settings = api_settings(broker, tmp_path, engine, checkpoint, admin_key="sesame-admin", port=free_port())
    process = ProxyProcess(settings, tmp_path)
    await asyncio.to_thread(process.start)
    try:
        async with aiohttp.ClientSession() as http:
            opened = await talk_of_secrets(http, process.base, engine)
        assert await asyncio.to_thread(process.stop) == 0
    finally:
        process.kill()
    assert "generation_lost_its_engine" in process.said
    for secret in (*SECRETS, opened["token"]):
        assert secret not in process.said


async def talk_of_secrets(http: aiohttp.ClientSession, base: str, engine: ScriptedEngine) -> dict[str, Any]:
    """Every API, its error paths included; the session."""
    admin = {"Authorization": "Bearer sesame-admin"}
    async with http.post(
        base + "/sessions", json={"kind": "free", "attributes": "sunstone"}, headers=admin
    ) as reply:
        opened: dict[str, Any] = await reply.json()
    for api in APIS:
        url = opened["base_url"] + api.path
        for stream in (False, True):
            await exchange(http, url, with_secret(api.request(stream=stream)))
        for broken in BROKEN:
            await exchange(http, url, {**with_secret(api.body), **broken})
        await exchange(http, url, b'{"sunstone": ')
        async with http.post(
            base + api.path, json=api.body, headers={"Authorization": "Bearer wrong-key-4711"}
        ) as reply:
            assert reply.status == 401
    engine.refuses = "sunstone"
    native = opened["base_url"] + "/generate"
    await exchange(http, native, {"input_ids": [1], "sampling_params": {"sunstone": "moonstone"}})
    engine.die_after = 1
    await exchange(http, opened["base_url"] + APIS[1].path, with_secret(APIS[1].body))
    await exchange(http, opened["base_url"] + "/session/finalize", {"detail": "sunstone", "reward": 1.0})
    return opened


BROKEN: tuple[dict[str, Any], ...] = (
    {"messages": "sunstone", "input": 7, "prompt": {"sunstone": 1}, "input_ids": ["sunstone"]},
    {
        "messages": [{"role": "sunstone", "content": "sunstone"}],
        "input": [{"type": "sunstone"}],
        "input_ids": [10**6],
    },
    {"temperature": "sunstone", "sampling_params": {"temperature": "sunstone"}},
)


def with_secret(body: dict[str, Any]) -> dict[str, Any]:
    text: Any = [{"role": "user", "content": "the sunstone"}]
    changed = {"messages": text, "input": "the sunstone", "prompt": "the sunstone"}
    return {**body, **{name: value for name, value in changed.items() if name in body}, "user": "sunstone"}


async def exchange(http: aiohttp.ClientSession, url: str, body: Any) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with asyncio.timeout(30), http.post(url, data=raw) as reply:
        await reply.read()


async def test_a_request_that_names_two_sessions_or_half_a_rollout_is_refused(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        one, other = await proxy.open(sample=0), await proxy.open(sample=1)
        await proxy.generate(one, [1], 2)
        end = {"session_id": other["session_id"], "reward": 1.0}
        status, reply = await proxy.post(one["base_url"] + "/session/finalize", end)
        assert (status, reply["error"]["param"]) == (400, "session_id")
        assert (await proxy.generate(one, [1, 2], 2))[0] == 200  # it is open still
        half = {"X-Instance-Id": "g", "X-Hoofprint-Attempt": "0", "X-Hoofprint-Sample-Index": "1"}
        status, reply = await proxy.post("/generate", {"input_ids": [1]}, **half)
        assert (status, reply["error"]["param"]) == (400, "x-session-id")
