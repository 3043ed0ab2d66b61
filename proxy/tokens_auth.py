"""Signed session tokens: who the session is and where in the log it began, so that any proxy of the run can go on with it.

The token is `base64url(JSON) . base64url(HMAC-SHA256)`. Its key is derived from the admin key, or from a secret file in
the run directory, so a restarted proxy accepts the tokens of its predecessor. It stands in paths, so it is short and
safe for URLs; it is a capability for one session and for nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec

from schemas.errors import Unauthorized
from schemas.events import Kind

_SIGNATURE_BYTES = 18


class SessionToken(msgspec.Struct, frozen=True, array_like=True):
    """What a token says. `partition`, `offset`: the session's first claim; `offset` -1: unknown, search by age."""

    session_id: str
    parent_traj_id: str
    kind: Kind
    group_id: str | None
    attempt: int | None
    sample_index: int | None
    instance_id: str | None
    partition: int
    offset: int
    epoch: int


class TokenSigner:
    """Issues and checks tokens of one run."""

    def __init__(self, key: bytes, run_id: str) -> None:
        self._key = hashlib.sha256(b"hoofprint session token\0" + run_id.encode() + b"\0" + key).digest()

    def issue(self, token: SessionToken) -> str:
        """Text for a path or a bearer header."""
        body = _encode(msgspec.json.encode(token))
        return f"{body}.{self._sign(body)}"

    def read(self, text: str) -> SessionToken:
        """Unauthorized unless this run issued it."""
        if not self.issued(text):
            raise Unauthorized("the session token is not valid here")
        body = text.partition(".")[0]
        try:
            return msgspec.json.decode(_decode(body), type=SessionToken)
        except (ValueError, msgspec.DecodeError) as wrong:
            raise Unauthorized("the session token is of another version") from wrong

    def claimed(self, text: str) -> str | None:
        """The session that a token names, genuine or not."""
        try:
            body = _decode(text.partition(".")[0])
            return msgspec.json.decode(body, type=SessionToken).session_id
        except (ValueError, msgspec.DecodeError):
            return None

    def issued(self, text: str) -> bool:
        """Whether it is a token of this run."""
        body, dot, signature = text.partition(".")
        return bool(dot) and hmac.compare_digest(signature.encode(), self._sign(body).encode())

    def _sign(self, body: str) -> str:
        return _encode(hmac.digest(self._key, body.encode(), "sha256")[:_SIGNATURE_BYTES])


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def signing_key(admin_key: str, run_directory: Path) -> bytes:
    """The admin key where there is one, else the run's secret file, made at the first start (readable by its owner only)."""
    if admin_key:
        return admin_key.encode()
    file = run_directory / "proxy.secret"
    try:
        return file.read_bytes()
    except FileNotFoundError:
        run_directory.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(handle, secrets.token_bytes(32))
        finally:
            os.close(handle)
        try:
            os.link(temporary, file)  # the first one wins, also between replicas
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        return file.read_bytes()


def same_key(given: str, wanted: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())
