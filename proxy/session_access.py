"""From a request to its session: path token, bearer token or headers; opening, recovery after a crash, and who may do what.

First that is there wins: `/s/<token>/…`, a session token as API key, `X-Session-Id`, `X-SMG-Routing-Key`, body `session_id`;
with none of them the call is a session of its own that ends with its answer. A session belongs to a group only if it was
opened so or its headers name group, attempt and sample; else its kind is `free`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from journal.clock import Clock
from proxy.api_fields import NAME
from proxy.asgi import Call
from proxy.control_view import ControlView
from proxy.limits import Limits
from proxy.ownership import Holding, Ownership, SessionTaken
from proxy.recorder import Recorder
from proxy.recovery import CLAIMS, Recovery, token_of
from proxy.sessions import Identity, Session, SessionTable, end_error
from proxy.tokens_auth import SessionToken, TokenSigner, same_key
from schemas.errors import BadRequest, HoofprintError, Overloaded, TrajectoryGone, Unauthorized
from schemas.events import Kind
from schemas.ids import free_traj_id, parent_traj_id

Ids = tuple[Identity, SessionToken | None]


@dataclass(eq=False)
class _Turnstile:
    """Lets one call at a time claim a session."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0


class SessionAccess:
    """The door to the session table."""

    def __init__(
        self, table: SessionTable, recorder: Recorder, ownership: Ownership, recovery: Recovery, control: ControlView,
        signer: TokenSigner, limits: Limits, run_id: str, group_size: int, admin_key: str, clock: Clock,
    ) -> None:  # fmt: skip
        self.table = table
        self._recorder = recorder
        self._ownership = ownership
        self._recovery = recovery
        self._control = control
        self._signer = signer
        self._limits = limits
        self._run_id = run_id
        self._group_size = group_size
        self._admin_key = admin_key
        self._clock = clock
        self._turnstiles: dict[str, _Turnstile] = {}

    # -- who asks ------------------------------------------------------------------------------------

    def check_admin(self, call: Call) -> None:
        """Unauthorized unless the admin key was given. Without one, whoever reaches the (loopback) port is an admin, but not
        the bearer of a session's key."""
        key = _bearer(call)
        if self._admin_key:
            if not same_key(key, self._admin_key):
                raise Unauthorized("this call needs the admin key")
        elif self._signer.issued(key):
            raise Unauthorized("a session token opens its session alone")

    def identify(self, call: Call, body: Mapping[str, Any]) -> Ids | None:
        """The session that a request names; None if it names none."""
        text = call.path_params.get("token", "")
        bearer = "" if text else _bearer(call)
        if not text and "." in bearer:
            text = bearer
        if text:
            token = self._token(text)
            if (body.get("session_id") or token.session_id) != token.session_id:
                raise BadRequest("session_id names another session than the token", field="session_id")
            return identity_of(token), token
        if self._admin_key and not same_key(bearer, self._admin_key):
            raise Unauthorized("a session token or the admin key is needed")
        name = call.header("x-session-id") or call.header("x-smg-routing-key") or body.get("session_id") or ""
        if not name:
            if call.header("x-hoofprint-attempt") or call.header("x-hoofprint-sample-index"):
                raise BadRequest("a rollout of a group needs X-Session-Id as well", field="x-session-id")
            return None
        NAME.check(name, "session_id")
        known = self.table.open.get(name) or self.table.ended.get(name)
        return (known.identity, None) if known is not None else (self._from_headers(call, body, name), None)

    def _token(self, text: str) -> SessionToken:
        """What a token says. Unauthorized."""
        session = self.table.open.get(self._signer.claimed(text) or "")
        if session is not None and session.shown is not None and same_key(text, session.shown[0]):
            return session.shown[1]
        token = self._signer.read(text)
        if session is not None:
            session.shown = (text, token)
        return token

    def _from_headers(self, call: Call, body: Mapping[str, Any], name: str) -> Identity:
        group = call.header("x-instance-id") or body.get("instance_id") or None
        if group is not None:
            NAME.check(group, "instance_id")
        attempt = call.whole_number("x-hoofprint-attempt")
        sample = call.whole_number("x-hoofprint-sample-index")
        if group is not None and attempt is not None and sample is not None:
            return self.group_identity("train", group, attempt, sample, None, name)
        return self.free_identity(name, "free", group)

    def group_identity(
        self, kind: Kind, group: str, attempt: int, sample: int, instance: str | None, name: str | None = None
    ) -> Identity:
        """A session of a group: its id is its trajectory's. BadRequest: a group to train on has no such sample."""
        if kind == "train" and sample >= self._group_size:
            raise BadRequest(
                f"sample_index must be below {self._group_size}, which is group.size",
                field="sample_index" if name is None else "x-hoofprint-sample-index",
                group_size=self._group_size,
            )
        trajectory = parent_traj_id(self._run_id, group, attempt, sample)
        return Identity(name or trajectory, trajectory, kind, group, attempt, sample, instance)

    def free_identity(self, name: str | None, kind: Kind, instance: str | None) -> Identity:
        """A session that belongs to no group."""
        name = name or uuid.uuid4().hex
        return Identity(name, free_traj_id(self._run_id, name), kind, instance_id=instance)

    def known(self, call: Call) -> Session | None:
        """The open session that a call claims to belong to: unchecked, so nothing but a hint."""
        text = call.path_params.get("token", "")
        name = self._signer.claimed(text) if text else call.header("x-session-id")
        return self.table.open.get(name) if name else None

    # -- finding it ----------------------------------------------------------------------------------

    async def session_for(self, call: Call, body: Mapping[str, Any]) -> tuple[Session, bool]:
        """The open session of a generation request, and whether it lives for this one call only."""
        self.check_ready()
        found = self.identify(call, body)
        if found is None:
            identity, now = self.free_identity(None, "free", None), self._clock()
            return Session(identity, Holding(identity.session_id, now), "", now), True
        return await self.open_session(*found), False

    async def open_session(self, identity: Identity, token: SessionToken | None) -> Session:
        """From memory, or from the log. TrajectoryClosed, TrajectoryGone, StalenessExceeded, …: it has ended."""
        session = self._known(identity, token)
        if session is None:
            async with self._claiming(identity.session_id):
                session = self._known(identity, token)  # another call may have recovered it meanwhile
                session = session or await self._find(identity, token)
        if token is not None and token.epoch < session.born:
            raise TrajectoryGone("the session was opened anew", session_id=identity.session_id)
        session.used_at = self._clock()
        return session

    async def reopen(self, session: Session) -> Session:
        """The same try of a session whose claim is over, under a new claim. TrajectoryGone: it was started anew."""
        found = await self.open_session(session.identity, self._signer.read(session.token))
        if found.born != session.born:
            raise TrajectoryGone("the session was opened anew", session_id=session.identity.session_id)
        return found

    def _known(self, identity: Identity, token: SessionToken | None) -> Session | None:
        """The open session of this process, unless another replica has claimed it since."""
        session = self.table.open.get(identity.session_id)
        if session is None:
            return None
        overtaken = token is not None and token.epoch > session.epoch
        if session.stale_claim or overtaken:
            self.table.forget(session, lost=overtaken)
            return None
        return session

    async def _find(self, identity: Identity, token: SessionToken | None) -> Session:
        ended = self.table.ended.get(identity.session_id)
        if ended is not None and (token is None or token.epoch <= ended.epoch):
            raise end_error(ended.identity, ended.end)
        self.check_attempt(identity)
        self._limits.check_sessions(len(self.table.open))
        session = await self._recover(identity, token)
        session.check_open()
        return session

    @contextlib.asynccontextmanager
    async def _claiming(self, name: str) -> AsyncIterator[None]:
        """One claim of a session at a time: of two in a row the later one would be void in the log, but not here."""
        turnstile = self._turnstiles.setdefault(name, _Turnstile())
        turnstile.calls += 1  # a lock that is being handed on looks free: who waits is counted
        try:
            async with turnstile.lock:
                yield
        finally:
            turnstile.calls -= 1
            if not turnstile.calls:
                del self._turnstiles[name]

    async def _recover(self, identity: Identity, token: SessionToken | None) -> Session:
        session = await self._recovery.recover(identity, token)
        if not session.started and self._control.is_kept(identity.group_id, identity.attempt):
            raise TrajectoryGone(
                "the group attempt was decided, and the log has nothing of the session any more",
                group_id=identity.group_id, attempt=identity.attempt, session_id=identity.session_id,
            )  # fmt: skip
        end = session.end
        self.table.add(session)
        if end is not None:
            self.table.finish(session, end)
        return session

    # -- opening -------------------------------------------------------------------------------------

    async def open_new(
        self, identity: Identity, *, restart: bool, attributes: str | None, named: bool = False
    ) -> Session:
        """A session from scratch. Opening one that is open returns it; `restart` voids whatever there was. `named`: its
        opener chose the id, so that it may have been open before."""
        self.check_ready()
        self.check_attempt(identity)
        if named and not restart and identity.group_id is None:
            # the log may know the name, from another proxy
            session = await self.open_session(identity, None)
            if not session.started:
                await self._begin(session, attributes)
            return session
        async with self._claiming(identity.session_id):
            return await self._open_new(identity, restart=restart, attributes=attributes)

    async def _open_new(self, identity: Identity, *, restart: bool, attributes: str | None) -> Session:
        name = identity.session_id
        old, ended = self._known(identity, None), self.table.ended.get(name)
        if old is not None and not restart:
            return old
        if ended is not None and not restart:
            raise end_error(ended.identity, ended.end)
        self._limits.check_sessions(len(self.table.open) - (old is not None))
        if old is not None:
            interrupt(old, TrajectoryGone("the session was opened anew", session_id=name))
            self.table.forget(old)
            self.table.on_end(name)
        known = old.epoch if old is not None else ended.epoch if ended is not None else 0
        # one that this process does not know may have a forgotten past (its opener never got the token): void
        unknown = identity.group_id is not None and old is None
        session = await self._claim(identity, known, restart=restart or unknown)
        await self._begin(session, attributes)
        self.check_attempt(identity)  # it may have been decided meanwhile
        self.table.add(session)
        return session

    async def _begin(self, session: Session, attributes: str | None) -> None:
        if session.identity.instance_id is not None or attributes is not None:
            await self._recorder.begin(session, attributes)

    async def _claim(self, identity: Identity, known: int, *, restart: bool) -> Session:
        for _ in range(CLAIMS):
            holding = self._ownership.hold(identity.session_id, known)
            try:
                position = await self._recorder.claim(identity, holding, restart=restart)
            except SessionTaken:
                continue  # the next claim lies above the one that was seen
            token = self._signer.issue(token_of(identity, position, holding.epoch))
            session = Session(identity, holding, token, self._clock())
            session.born = holding.epoch if restart else 0
            return session
        raise SessionTaken("another proxy keeps claiming the session", session_id=identity.session_id)

    def check_ready(self) -> None:
        """503 until the log was folded."""
        if not self._control.ready:
            raise Overloaded("the proxy is still reading the log", http_status=503, retry_after_s=1.0)

    def check_attempt(self, identity: Identity) -> None:
        """TrajectoryGone if the attempt was closed by its verdict."""
        if self._control.is_closed(identity.group_id, identity.attempt):
            raise TrajectoryGone(
                "the group attempt was closed", group_id=identity.group_id, attempt=identity.attempt,
                session_id=identity.session_id,
            )  # fmt: skip


def interrupt(session: Session, reason: HoofprintError) -> None:
    """Abort what a session has in flight; its callers get `reason`."""
    for generation, task in list(session.inflight.items()):
        if task is not None and generation.interrupt is None:
            generation.interrupt = reason
            task.cancel()


def identity_of(token: SessionToken) -> Identity:
    """The ids in a token."""
    return Identity(
        token.session_id, token.parent_traj_id, token.kind, token.group_id, token.attempt, token.sample_index,
        token.instance_id,
    )  # fmt: skip


def _bearer(call: Call) -> str:
    scheme, _, key = call.header("authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else call.header("x-api-key")
