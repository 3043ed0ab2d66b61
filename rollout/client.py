"""The client of the proxy: open a session, generate token-in token-out, finalize.

Every call is repeated while the proxy is away (`persistence.py`): the session token lets a restarted proxy recover the
session from the log, and an answer whose acknowledgement was lost is an abandoned turn there. An answer is written to
the answer log before the agent sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import aiohttp
import orjson

from rollout.agent_api import Finish
from rollout.answers import AnswerLog
from rollout.persistence import NO_CONNECTION, CallFailed, Persistence

T = TypeVar("T")
_CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 4.0
"""Less than what servers keep idle connections for (uvicorn: 5 s), so that we never write into a closing one."""


class Post(Protocol):
    """One POST of JSON to an absolute URL; raises CallFailed."""

    def __call__(self, url: str, body: Mapping[str, Any], /) -> Awaitable[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `logprobs` is empty unless the request asked for them; `raw` is the whole reply."""

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    raw: Mapping[str, Any]


class Session:
    """One open trajectory at the proxy."""

    def __init__(
        self,
        opened: Mapping[str, Any],
        ids: Mapping[str, Any],
        post: Post,
        answers: AnswerLog,
        persist: Persistence,
    ) -> None:
        self.session_id = str(opened["session_id"])
        self.parent_traj_id = str(opened["parent_traj_id"])
        self.base_url = str(opened["base_url"])
        self.headers: Mapping[str, str] = opened.get("headers") or {}
        self._ids = dict(ids)
        self._post = post
        self._answers = answers
        self._persist = persist

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], *, return_logprob: bool = False
    ) -> Generation:
        """Continue `input_ids`, which is the whole context. Raises AttemptClosed, TrajectoryRefused, ProxyAway, CallFailed."""
        body = {
            "input_ids": list(input_ids),
            "sampling_params": dict(sampling_params),
            "return_logprob": return_logprob,
        }
        reply = await self.persist(lambda: self._post(f"{self.base_url}/generate", body))
        meta = reply["meta_info"]
        output_ids = reply["output_ids"]
        self._answers.tokens(self._where(meta["hoofprint"]), output_ids)
        triples = meta.get("output_token_logprobs") or ()
        return Generation(output_ids, [t[0] for t in triples], meta["finish_reason"]["type"], reply)

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call of another client (the openai SDK) with this session's patience; it raises CallFailed."""
        return await self._persist(call)

    def received_text(self, content: str, place: Mapping[str, Any]) -> None:
        """An agent that uses another client says so for each answer, before it uses it. `place`: the reply's `hoofprint`."""
        self._answers.text(self._where(place), content)

    async def finalize(self, finish: Finish, detail: str | None = None) -> None:
        """End the trajectory; repeating it is harmless. Raises as `generate`."""
        body: dict[str, Any] = {
            "session_id": self.session_id,
            "status": finish.status,
            "reason": finish.reason,
            "reward": finish.reward,
            "reward_pending": finish.reward is None and finish.status != "failed",
            "components": dict(finish.components),
        }
        if detail is not None:
            body["detail"] = detail
        await self.persist(lambda: self._post(f"{self.base_url}/session/finalize", body))

    def _where(self, place: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "parent_traj_id": place["parent_traj_id"],
            "segment_index": place["segment_index"],
            **self._ids,
        }


class ProxyClient:
    """Keeps the connections to one proxy. `patience_s`: how long a call waits for a proxy that is away."""

    def __init__(self, url: str, answers: AnswerLog, patience_s: float, admin_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._answers = answers
        self._persist = Persistence(patience_s)
        headers = {"Content-Type": "application/json"}
        if admin_key:
            headers["Authorization"] = f"Bearer {admin_key}"
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers=headers,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def open(
        self, group_id: str, attempt: int, sample_index: int, *, kind: str = "train", restart: bool = False
    ) -> Session:
        """Open one trajectory. `restart`: whatever was recorded of it before is void."""
        ids = {"group_id": group_id, "attempt": attempt}
        body = {"kind": kind, **ids, "sample_index": sample_index, "restart": restart}
        opened = await self._persist(lambda: self._post(f"{self._url}/sessions", body))
        return Session(opened, ids, self._post, self._answers, self._persist)

    async def _post(self, url: str, body: Mapping[str, Any], /) -> dict[str, Any]:
        try:
            async with self._http.post(url, data=orjson.dumps(body)) as reply:
                raw = await reply.read()
        except (aiohttp.ClientError, OSError) as lost:
            raise CallFailed(NO_CONNECTION, "no_connection", f"{type(lost).__name__}: {lost}") from lost
        if reply.status >= 400:
            raise failure_of(reply.status, raw, reply.headers.get("Retry-After"))
        decoded: dict[str, Any] = orjson.loads(raw)
        return decoded

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def failure_of(status: int, raw: bytes, retry_after: str | None) -> CallFailed:
    """The error in a reply: `{"error": {"code", "message"}}`, or whatever the body says."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        code, message = str(error.get("code") or error.get("type") or ""), str(error.get("message") or error)
    else:
        code, message = "", str(error if error is not None else raw[:200])
    try:
        wait = None if retry_after is None else float(retry_after)
    except ValueError:
        wait = None  # an HTTP date: our own backoff is good enough
    return CallFailed(status, code, message, wait)
