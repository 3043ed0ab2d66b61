"""Sessions over HTTP: open, finalize, reward, discard, and the expiry of idle ones.

Design §5: finalize aborts what is in flight and is idempotent: a repeated one gets the first answer, from another proxy,
too. An idle session expires with `TrajectoryEnded(failed, expired)`; later calls get 410, never a silent new session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog

from journal.clock import Clock
from proxy.api_fields import DISCARD, FINALIZE, OPEN_SESSION, REWARD
from proxy.asgi import Call
from proxy.ownership import SessionTaken
from proxy.recorder import Recorder
from proxy.recovery import CLAIMS
from proxy.session_access import SessionAccess, interrupt
from proxy.sessions import CLOSED_ATTEMPT, DISCARDED, EXPIRED, Identity, Session, end_error
from proxy.turns import check_reward, components_of, end_facts
from schemas.errors import (
    BadRequest,
    HoofprintError,
    TrajectoryClosed,
    TrajectoryGone,
    UnknownSession,
)
from schemas.events import EndFacts, Kind

log = structlog.get_logger(__name__)

_SWEEP_S = 1.0
_NEVER_FINALIZED = frozenset({EXPIRED, CLOSED_ATTEMPT, DISCARDED})


class SessionApi:
    """`/sessions` and `/session/…`, each also under `/s/<token>`."""

    def __init__(
        self, access: SessionAccess, recorder: Recorder, clock: Clock, max_body_bytes: int, address: str
    ) -> None:
        self._access = access
        self._recorder = recorder
        self._clock = clock
        self._max_body = max_body_bytes
        self._address = address

    async def open(self, call: Call) -> None:
        """`POST /sessions`."""
        self._access.check_admin(call)
        body = await call.json(self._max_body)
        OPEN_SESSION.check(body)
        identity = self._identity(body)
        attributes = body.get("attributes")
        session = await self._access.open_new(
            identity,
            restart=bool(body.get("restart")),
            named=body.get("session_id") is not None,
            attributes=None
            if attributes is None
            else orjson.dumps(attributes, option=orjson.OPT_SORT_KEYS).decode(),
        )
        headers = {"X-Session-Id": identity.session_id}
        if identity.group_id is not None:
            headers["X-Instance-Id"] = identity.group_id
            headers["X-Hoofprint-Attempt"] = str(identity.attempt)
            headers["X-Hoofprint-Sample-Index"] = str(identity.sample_index)
        host = call.header("host") or self._address
        await call.reply(
            {
                "session_id": identity.session_id,
                "parent_traj_id": identity.parent_traj_id,
                "token": session.token,
                "base_url": f"http://{host}/s/{session.token}",
                "headers": headers,
            }
        )

    def _identity(self, body: dict[str, Any]) -> Identity:
        kind: Kind = body.get("kind") or ("free" if body.get("group_id") is None else "train")
        group, instance = body.get("group_id"), body.get("instance_id")
        if (group is None and kind != "train") or kind == "free":
            for field in ("group_id", "attempt", "sample_index"):
                if body.get(field) is not None:
                    raise BadRequest(f"{field} goes with a session of a group", field=field)
            return self._access.free_identity(body.get("session_id"), kind, instance)
        if body.get("session_id") is not None:
            raise BadRequest("a session of a group has its trajectory's id", field="session_id")
        sample = body.get("sample_index")
        if group is None or sample is None:
            missing = "group_id" if group is None else "sample_index"
            raise BadRequest(f"{missing} is required", field=missing)
        return self._access.group_identity(kind, group, body.get("attempt") or 0, sample, instance)

    async def finalize(self, call: Call) -> None:
        """`POST /session/finalize`: the end, with its reward where it is known."""
        body = await call.json(self._max_body)
        FINALIZE.check(body)
        await while_ours(lambda: self._finalize(call, body))

    async def _finalize(self, call: Call, body: dict[str, Any]) -> None:
        end = end_facts(body)
        try:
            session = await self._session(call, body)
        except (TrajectoryClosed, TrajectoryGone) as over:
            await self._answer_again(call, body, over)
            return
        except HoofprintError as refused:
            if refused.http_status == 502 and end.status == "failed":
                await self._answer_again(call, body, refused)
                return
            raise
        if session.next_index == 0 and not session.inflight and end.status == "completed":
            raise BadRequest("the session has no steps: a completed trajectory needs one", field="session_id")
        check_reward(end, session.identity.kind)
        interrupt(
            session, TrajectoryClosed("the trajectory was finalized", session_id=session.identity.session_id)
        )
        held = await self._recorder.end(session, end)
        await call.reply(_end_reply(session.identity, held))

    async def _answer_again(self, call: Call, body: dict[str, Any], over: HoofprintError) -> None:
        """The first answer, if the session was finalized; a refused one may be told that it failed."""
        ended = self._access.table.ended.get(self._name(call, body))
        if ended is None or ended.end.reason in _NEVER_FINALIZED:
            raise over
        await call.reply(_end_reply(ended.identity, ended.end))

    async def discard(self, call: Call) -> None:
        """`POST /session/discard`: nobody wants it; idempotent."""
        body = await call.json(self._max_body)
        DISCARD.check(body)
        await while_ours(lambda: self._discard(call, body))

    async def _discard(self, call: Call, body: dict[str, Any]) -> None:
        try:
            session = await self._session(call, body)
        except (TrajectoryClosed, TrajectoryGone):
            ended = self._access.table.ended.get(self._name(call, body))
            discarded = ended is not None and ended.end.reason == DISCARDED
            await call.reply({"session_id": self._name(call, body), "discarded": discarded})
            return
        interrupt(
            session, TrajectoryGone("the session was discarded", session_id=session.identity.session_id)
        )
        await self._recorder.end(session, EndFacts(segment_count=0, status="failed", reason=DISCARDED))
        await call.reply({"session_id": session.identity.session_id, "discarded": True})

    async def reward(self, call: Call) -> None:
        """`POST /session/reward`: for a trajectory that ended with `reward_pending`; the first one wins."""
        body = await call.json(self._max_body)
        REWARD.check(body)
        value = float(body["reward"])
        found = self._access.identify(call, body)
        if found is None:
            raise BadRequest("session_id is missing", field="session_id")
        identity, token = found
        table = self._access.table
        claimed = token or table.open.get(identity.session_id) or table.ended.get(identity.session_id)
        if claimed is None:
            raise UnknownSession("no such session; use its token", session_id=identity.session_id)
        source = body.get("source") or "session"
        await self._recorder.reward(identity, claimed.epoch, value, components_of(body), source)
        await call.reply({"session_id": identity.session_id, "reward": value})

    async def _session(self, call: Call, body: dict[str, Any]) -> Session:
        self._access.check_ready()
        found = self._access.identify(call, body)
        if found is None:
            raise BadRequest("session_id is missing", field="session_id")
        identity, token = found
        table, name = self._access.table, identity.session_id
        known = name in table.open or name in table.ended
        session = await self._access.open_session(identity, token)
        if token is None and identity.group_id is None and not known and not session.started:
            table.forget(session)  # nor does the log
            raise UnknownSession("no such session; use its token", session_id=name)
        return session

    def _name(self, call: Call, body: dict[str, Any]) -> str:
        found = self._access.identify(call, body)
        return "" if found is None else found[0].session_id

    async def expire(self, idle_s: float) -> None:
        """Until cancelled: end what was idle for too long."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, idle_s / 2))
            await self.expire_idle(idle_s)

    async def expire_idle(self, idle_s: float) -> None:
        """End what was not used for so long."""
        for session in self._access.table.idle_since(self._clock() - int(idle_s * 1e6)):
            try:
                await self._recorder.end(session, EndFacts(segment_count=0, status="failed", reason=EXPIRED))
            except HoofprintError as failed:
                log.warning("expiry_failed", error=failed, session_id=session.identity.session_id)

    def close_attempt(self, group_id: str, attempt: int) -> None:
        """A verdict closed the attempt: abort and forget; its end needs no event."""
        for session in self._access.table.of_attempt(group_id, attempt):
            end = EndFacts(segment_count=session.next_index, status="failed", reason=CLOSED_ATTEMPT)
            interrupt(session, end_error(session.identity, end))
            self._access.table.finish(session, end)


async def while_ours(work: Callable[[], Awaitable[None]]) -> None:
    """Do it again where another replica had claimed the session: the next try claims it back."""
    for _ in range(CLAIMS):
        try:
            return await work()
        except SessionTaken:
            continue
    return await work()


def _end_reply(identity: Identity, end: EndFacts) -> dict[str, Any]:
    return {
        "session_id": identity.session_id,
        "parent_traj_id": identity.parent_traj_id,
        "status": end.status,
        "reason": end.reason,
        "segment_count": end.segment_count,
        "reward": end.reward,
        "reward_pending": end.reward_pending,
        "components": end.components,
    }
