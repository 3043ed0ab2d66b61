"""The OpenAPI document of the proxy: what each route takes and what it may answer. Served at `/openapi.json`.

Bodies are those of `api_fields.py`, by which they are checked; other fields are advice. Conversations are described by their
simplest form. Every status that may come is named. The tests fuzz the proxy by it.
"""

from __future__ import annotations

import re
from typing import Any

from proxy.api_fields import BODIES
from proxy.fields import TEXT, Record, whole
from schemas import errors as err
from schemas.errors import HoofprintError

_ANY_CALL = (err.BadRequest, err.Unauthorized)
_GENERATION = (
    *_ANY_CALL, err.UnknownSession, err.SessionConflict, err.TrajectoryGone, err.ContextOverflow, err.Overloaded,
    err.StalenessExceeded, err.EngineUnavailable, err.EngineTimeout,
)  # fmt: skip
_SESSION = (
    *_ANY_CALL,
    err.UnknownSession,
    err.SessionConflict,
    err.TrajectoryGone,
    err.Overloaded,
    err.StalenessExceeded,
)
_PASSED = (err.PublishFailed, err.PublishTimeout, err.StoreError)
_ALSO = {
    413: "The body is too large, or the prompt fills the context window",
    431: "The headers are too large",
}


_ADMIN = ("/v1/policy", "/v1/rollout", "/v1/engines")


def _errors(path: str) -> tuple[type[HoofprintError], ...]:
    if path.startswith("/session"):
        return (*_SESSION, *_PASSED)
    if path.startswith(_ADMIN):
        return (
            *_ANY_CALL,
            err.UnknownSession,
            err.UnknownEngine,
            err.NotQuiesced,
            err.VersionConflict,
            err.LastEngine,
            err.VersionRefused,
            err.Overloaded,
            err.EngineUnavailable,
            *_PASSED,
        )
    if path in BODIES:
        return (*_GENERATION, *_PASSED)
    return (*_ANY_CALL, err.EngineUnavailable)


def _responses(path: str) -> dict[str, Any]:
    said: dict[int, list[str]] = {}
    for error in _errors(path):
        said.setdefault(error.http_status, []).append((error.__doc__ or error.code).split("\n", 1)[0])
    found: dict[str, Any] = {
        "200": {"description": "Done; a stream of server-sent events where one was asked for"}
    }
    for status, texts in {**said, **{status: [text] for status, text in _ALSO.items()}}.items():
        found[str(status)] = {
            "description": " / ".join(texts),
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    return dict(sorted(found.items()))


def operation(method: str, path: str, api: str, summary: str) -> dict[str, Any]:
    """One route; `api`: its path without the session's token."""
    described: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method}_{path}".lower().replace("/", "_").replace("{token}", "session"),
        "responses": _responses(api),
    }
    names = re.findall(r"\{(\w+)", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    body = BODIES.get(api)
    if body is not None:
        content = {"application/json": {"schema": body.schema}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def document(routes: list[tuple[str, str, str, str]], version: str) -> dict[str, Any]:
    """`routes`: method, path, path without token, summary."""
    paths: dict[str, Any] = {}
    for method, path, api, summary in routes:
        named = path.replace(":path}", "}")
        paths.setdefault(named, {})[method.lower()] = operation(
            method, named, api.replace(":path}", "}"), summary
        )
    error = Record(
        {"message": TEXT, "type": TEXT, "code": TEXT, "status": whole(400, 599)}, ("message", "code")
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hoofprint proxy", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": Record({"error": error}, ("error",)).schema}},
    }
