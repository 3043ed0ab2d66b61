"""One engine: its HTTP calls in SGLang's contract, and what is known of it.

Generations are always streamed, so that the tokens which an engine had sent before it died are kept. Invariants: request
ids are uuids of one length (SGLang aborts by prefix); the client closes idle connections before the engine does; a
call that ends early closes its connection, which aborts it at the engine, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy.engine_stream import ChunkReader, Mode, refusal
from proxy.output import Output
from proxy.token_pace import TokenPace
from schemas.errors import EngineRejected, EngineTimeout, EngineUnavailable

_CONNECT_S = 3.0
_CONTROL_S = 20.0
_FLUSH_S = 20.0
_FLUSH_AGAIN_S = 0.05
_KEEPALIVE_S = 3.0  # SGLang and uvicorn close idle connections after 5 s
_BROKEN = (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError, OSError)
_TRIES = 3
Wanted = tuple[str, str | None]
"""A version and its checkpoint; without one only an outer trainer can give it."""
_UPDATED_BUT = "Weights were updated, but"


def engine_http() -> aiohttp.ClientSession:
    """The connection pool of all engines."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        headers={"Content-Type": "application/json"},
    )


class Engine:
    """Knows its label and limits from `/model_info` and `/server_info`; `up` is what the last contact said.

    `in_rotation`: it has the wanted weights and no pause; `draining`: an operator has taken it out. `changing` is held by
    whoever changes its weights."""

    def __init__(self, base_url: str, http: aiohttp.ClientSession, timeout_s: float) -> None:
        self.base_url = base_url.rstrip("/")
        self.engine_id = self.base_url.removeprefix("http://").removeprefix("https://")
        self.version = ""
        self.model_path = ""
        self.vocab_size: int | None = None
        self.context_length: int | None = None
        self.tokenizer_path: str | None = None
        self.gives_experts = False
        self.up = False
        self.in_rotation = True
        self.draining = False
        self.changing = asyncio.Lock()
        self.inflight = 0
        self.pace = TokenPace()
        self._given: tuple[str, str, str] | None = None
        self._half_updated = False
        self._calls: set[asyncio.Timeout] = set()
        self._mode: Mode | None = None
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)

    def __repr__(self) -> str:
        state = "draining" if self.draining else f"rotation={self.in_rotation}"
        return f"Engine({self.engine_id}, version={self.version!r}, up={self.up}, {state})"

    @property
    def usable(self) -> bool:
        """Whether it may get a generation."""
        return self.up and self.in_rotation and not self.draining

    def has(self, version: str, checkpoint: str | None) -> bool:
        """Whether it serves these weights. One that was started anew may have the label of old without the weights: then its
        path is another than after the update that it was given. One whose update broke off has none for certain."""
        if self._half_updated or self.version != version or checkpoint is None:
            return self.version == version and not self._half_updated
        shown = self._given[2] if self._given and self._given[:2] == (version, checkpoint) else checkpoint
        return self.model_path in ("", shown)

    async def generate(
        self, body: Mapping[str, Any], session_id: str, reader: ChunkReader, news: Any
    ) -> None:
        """Stream one generation into `reader`; `news()` after each arrival. EngineUnavailable, EngineTimeout: what came
        until then is in the reader. EngineRejected: nothing was generated."""
        self.inflight += 1
        leash = asyncio.timeout(None)
        self._calls.add(leash)
        try:
            async with leash:
                await self._generate(body, session_id, reader, news)
        except TimeoutError as late:
            reader.settle()
            if leash.expired():
                raise EngineUnavailable("the call was taken from the engine", engine=self.engine_id) from late
            raise EngineTimeout("the engine did not finish in time", engine=self.engine_id) from late
        except _BROKEN as broken:
            reader.settle()
            self.up = False
            raise EngineUnavailable(
                f"the engine at {self.engine_id} broke off: {type(broken).__name__}", engine=self.engine_id
            ) from broken
        finally:
            self._calls.discard(leash)
            self._mode = reader.mode  # forgotten where wrong: another engine stands at the same address
            self.inflight -= 1

    def cut(self) -> None:
        """Close every call, for an engine that does not obey aborts; the tokens received are kept."""
        for leash in self._calls:
            if not leash.expired():
                leash.reschedule(0.0)

    async def _generate(
        self, body: Mapping[str, Any], session_id: str, reader: ChunkReader, news: Any
    ) -> None:
        async with self._http.post(
            f"{self.base_url}/generate",
            data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
            headers={"X-SMG-Routing-Key": session_id},
            timeout=self._timeout,
        ) as reply:
            if reply.status != 200:
                raise refusal(_json(await reply.read()), reply.status)
            began = 0.0
            while not reader.done:
                data = await reply.content.readany()
                if not data:
                    break
                began = began or time.monotonic()
                if reader.feed(data):
                    news()
        reader.settle()
        if not reader.changes:  # else a weight update was part of the time
            self.pace.observe(reader.count - 1, time.monotonic() - began)
        if reader.finish is None:
            self.up = False
            raise EngineUnavailable("the engine's stream ended before its time", engine=self.engine_id)

    def new_reader(self, output: Output) -> ChunkReader:
        """A reader that knows the engine's streaming mode if the engine has shown it."""
        return ChunkReader(self._mode, output, self.version)

    async def abort(self, rid: str) -> None:
        """Fire and forget: an engine that is away has nothing to abort."""
        try:
            await self._post("/abort_request", {"rid": rid})
        except EngineUnavailable:
            return

    async def pause(self, mode: str) -> None:
        """Hold generation. EngineUnavailable: it does not."""
        status, reply = await self._post("/pause_generation", {"mode": mode})
        if status != 200:
            raise EngineUnavailable(f"the engine does not pause: {status} {reply}", engine=self.engine_id)

    async def go_on(self) -> None:
        """End a pause; harmless where there is none, or nothing like it. EngineUnavailable: it may be paused still."""
        status, reply = await self._post("/continue_generation", {})
        if status >= 500:
            raise EngineUnavailable(f"the engine does not go on: {status} {reply}", engine=self.engine_id)

    async def update_weights(self, checkpoint: str, version: str, *, abort: bool = False) -> None:
        """Load a checkpoint directory under a label; `abort`: whatever runs there ends first, whoever sent it.
        EngineRejected: it has the weights of before. Any other HoofprintError, or a cancel: nobody knows what it has."""
        self._half_updated = True
        body = {"model_path": checkpoint, "weight_version": version, "flush_cache": True}
        if abort:
            body["abort_all_requests"] = True
        try:
            await self._load(body)
        except EngineRejected:
            self._half_updated = False
            raise
        await self.refresh()
        if self.version != version:
            raise EngineUnavailable(
                f"the engine says {self.version!r} after an update to {version!r}", engine=self.engine_id
            )
        self.accept(version, checkpoint)

    async def _load(self, body: Mapping[str, Any]) -> None:
        for _ in range(_TRIES):
            status, reply = await self._post("/update_weights_from_disk", body, self._timeout)
            message = str(reply.get("message", reply) if isinstance(reply, dict) else reply)
            if status == 200:
                return
            if not message.startswith(_UPDATED_BUT):
                raise refusal(reply if isinstance(reply, dict) and "error" in reply else message, status)
            await self._flush()  # and once more, because SGLang has the weights, but not their label

    def accept(self, version: str, checkpoint: str) -> None:
        """It has these weights now, whoever gave them."""
        self._half_updated = False
        self._given = (version, checkpoint, self.model_path)

    async def _flush(self) -> None:
        """Forget keys and values of the old weights. An update cannot while requests run whose clients are gone already (a
        closed session, say): their end is waited for. EngineUnavailable: it would go on with the old keys."""
        deadline = time.monotonic() + _FLUSH_S
        await self._post("/abort_request", {"abort_all": True})
        while (await self._post("/flush_cache", {}))[0] != 200:
            if time.monotonic() > deadline:
                raise EngineUnavailable("the engine keeps its old cache", engine=self.engine_id)
            await asyncio.sleep(_FLUSH_AGAIN_S)

    async def refresh(self) -> None:
        """Ask what it serves. EngineUnavailable if it does not answer; `up` follows."""
        info = await self._get("/model_info")
        if self.context_length is None:
            info = {**await self._get("/server_info"), **info}
        self.version = str(info.get("weight_version", "")).strip()
        self.model_path = str(info.get("model_path") or "")
        self.tokenizer_path = info.get("tokenizer_path") or self.tokenizer_path
        self.gives_experts = bool(info.get("enable_return_routed_experts", self.gives_experts))
        self.vocab_size = _whole(info.get("vocab_size")) or self.vocab_size
        self.context_length = _whole(info.get("context_length")) or self.context_length
        if self.vocab_size is None or self.context_length is None:
            self._read_config()
        # the size of SGLang's whole cache: no context is longer
        self.context_length = self.context_length or _whole(info.get("max_total_num_tokens"))
        self.up = True

    def _read_config(self) -> None:
        """SGLang names neither of its own accord: the checkpoint does, where it can be seen from here."""
        try:
            config = orjson.loads((Path(self.model_path) / "config.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return
        self.vocab_size = self.vocab_size or _whole(config.get("vocab_size"))
        self.context_length = self.context_length or _whole(config.get("max_position_embeddings"))

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            timeout = aiohttp.ClientTimeout(total=_CONTROL_S, sock_connect=_CONNECT_S)
            async with self._http.get(self.base_url + path, timeout=timeout) as reply:
                found = _json(await reply.read())
                if reply.status == 200 and isinstance(found, dict):
                    return found
                raise EngineUnavailable(f"{path} answers {reply.status}", engine=self.engine_id)
        except _BROKEN as broken:
            self.up = False
            raise EngineUnavailable(
                f"the engine at {self.engine_id} does not answer: {type(broken).__name__}",
                engine=self.engine_id,
            ) from broken

    async def _post(
        self, path: str, body: Mapping[str, Any], limit: aiohttp.ClientTimeout | None = None
    ) -> tuple[int, Any]:
        limit = limit or aiohttp.ClientTimeout(total=_CONTROL_S, sock_connect=_CONNECT_S)
        try:
            async with self._http.post(self.base_url + path, data=orjson.dumps(body), timeout=limit) as reply:
                return reply.status, _json(await reply.read())
        except _BROKEN as broken:
            self.up = False
            raise EngineUnavailable(
                f"{path}: the engine at {self.engine_id} does not answer: {type(broken).__name__}",
                engine=self.engine_id,
            ) from broken


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
