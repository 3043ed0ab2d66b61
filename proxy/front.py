"""FastAPI with a short way in: the endpoints of turns stand in one table that is looked up before any middleware runs.

A training step makes hundreds of calls of a few tokens each, and the routes' regular expressions and seven layers of middleware
cost more than such a call's own work. Invariant: the table holds only endpoints that are FastAPI's routes as well, so both
ways lead to the same answer.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

_SESSION = "/s/"


class Front(FastAPI):
    """`direct[method, path]`: endpoints by their path behind the session token, if there is one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct: dict[tuple[str, str], ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        endpoint = self._direct(scope) if scope["type"] == "http" else None
        await (super().__call__ if endpoint is None else endpoint)(scope, receive, send)

    def _direct(self, scope: Scope) -> ASGIApp | None:
        path: str = scope["path"]
        if not path.startswith(_SESSION):
            return self.direct.get((scope["method"], path))
        token, slash, rest = path[len(_SESSION) :].partition("/")
        endpoint = self.direct.get((scope["method"], slash + rest))
        if endpoint is not None:
            scope["path_params"] = {"token": token}
        return endpoint
