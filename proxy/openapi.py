"""The OpenAPI document of the proxy: what each route takes and what it may answer. Served at `/openapi.json`.

The agents' APIs take more than is named here (their documentation says it all, and unknown fields are advice): the document
names what a call cannot do without, what is honoured, and every status that may come. The tests fuzz the proxy by it.
"""

from __future__ import annotations

import re
from typing import Any

from schemas import errors as err
from schemas.errors import HoofprintError

_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_NUMBER: dict[str, Any] = {"type": "number"}
_OBJECT: dict[str, Any] = {"type": "object"}
_NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 256}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKENS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 2**31}
_UNIT: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1}
_SECONDS: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 3600}
_HEAT: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 100}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(items: dict[str, Any], least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


def _message(*roles: str) -> dict[str, Any]:
    return _object({"role": {"type": "string", "enum": list(roles)}, "content": _TEXT}, "role", "content")


_END = _object(
    {
        "status": {"type": "string", "enum": ["completed", "truncated", "failed"]},
        "reason": _TEXT,
        "reward": _NUMBER,
        "reward_pending": _FLAG,
        "components": {"type": "object", "additionalProperties": _NUMBER},
        "detail": _TEXT,
    }
)
_COMMON = {
    "stream": _FLAG,
    "final": _FLAG,
    "end": _END,
    "session_id": _NAME,
    "instance_id": _NAME,
    "turn_id": _NAME,
}
_SAMPLED = {**_COMMON, "model": _TEXT, "temperature": _HEAT, "top_p": _UNIT}
_SAMPLING = _object({"max_new_tokens": _TOKENS, "temperature": _HEAT, "top_p": _UNIT, "min_p": _UNIT})
_OPENAI = {**_SAMPLED, "max_tokens": _TOKENS, "seed": {"type": "integer"}, "stop": _list(_NAME, 0)}

_BODIES: dict[str, dict[str, Any]] = {
    "/generate": _object(
        {
            **_COMMON,
            "input_ids": _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}),
            "sampling_params": _SAMPLING,
            "return_logprob": _FLAG,
            "top_logprobs_num": {"type": "integer", "minimum": 0, "maximum": 64},
        },
        "input_ids",
    ),
    "/v1/chat/completions": _object(
        {
            **_OPENAI,
            "messages": _list(_message("system", "developer", "user", "assistant")),
            "tools": _list(
                _object({"type": {"const": "function"}, "function": _object({"name": _NAME}, "name")}, "function"), 0
            ),
            "logprobs": _FLAG,
            "stream_options": _object({"include_usage": _FLAG}),
        },
        "messages",
    ),
    "/v1/completions": _object({**_OPENAI, "prompt": _TEXT}, "prompt"),
    "/v1/responses": _object({**_SAMPLED, "input": _TEXT, "instructions": _TEXT, "max_output_tokens": _TOKENS}, "input"),
    "/v1/messages": _object(
        {
            **_SAMPLED,
            "messages": _list(_message("user", "assistant")),
            "system": _TEXT,
            "max_tokens": _TOKENS,
            "stop_sequences": _list(_NAME, 0),
            "thinking": _object({"type": {"enum": ["enabled", "disabled"]}}),
            "tools": _list(_object({"name": _NAME, "input_schema": _OBJECT}, "name"), 0),
        },
        "messages", "max_tokens",
    ),
    "/v1/messages/count_tokens": _object({"messages": _list(_message("user", "assistant")), "system": _TEXT}, "messages"),
    "/session/finalize": _object({**_END["properties"], "session_id": _NAME}),
    "/session/discard": _object({"session_id": _NAME}),
    "/session/reward": _object(
        {"session_id": _NAME, "reward": _NUMBER, "components": _END["properties"]["components"], "source": _TEXT}, "reward"
    ),
    "/sessions": _object(
        {
            "kind": {"type": "string", "enum": ["train", "eval", "free"]},
            "group_id": _NAME,
            "attempt": _COUNT,
            "sample_index": _COUNT,
            "session_id": _NAME,
            "instance_id": _NAME,
            "attributes": {},
            "restart": _FLAG,
        }
    ),
    "/v1/policy/versions": _object(
        {"version": _NAME, "checkpoint_uri": _NAME, "step": {"type": "integer"}, "force": _FLAG}, "version", "checkpoint_uri"
    ),
    "/v1/rollout/pause": _object(
        {
            "mode": {"type": "string", "enum": ["abort", "drain"]},
            "timeout_seconds": _SECONDS,
            "session_id": _NAME,
        }
    ),
    "/v1/engines/{engine_id}/drain": _object({"timeout_seconds": _SECONDS, "force": _FLAG}),
    "/v1/rollout/resume": _object({"version": _NAME, "session_id": _NAME}),
}  # fmt: skip

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
    if path in _BODIES:
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
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    body = _BODIES.get(api)
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


def document(routes: list[tuple[str, str, str, str]], version: str) -> dict[str, Any]:
    """`routes`: method, path, path without token, summary."""
    paths: dict[str, Any] = {}
    for method, path, api, summary in routes:
        named = path.replace(":path}", "}")
        paths.setdefault(named, {})[method.lower()] = operation(
            method, named, api.replace(":path}", "}"), summary
        )
    error = _object(
        {"message": _TEXT, "type": _TEXT, "code": _TEXT, "status": {"type": "integer"}}, "message", "code"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hoofprint proxy", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": _object({"error": error}, "error")}},
    }
