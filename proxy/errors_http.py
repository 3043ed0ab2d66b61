"""Errors on the wire: RFC 9457 fields inside OpenAI's `{"error": {...}}`, the same for every route.

`code` is stable and documented by the error tree; the detail's facts stand beside it. `type` follows OpenAI's words, so
that SDKs classify it.
"""

from __future__ import annotations

import math
from typing import Any

from schemas.errors import (
    HoofprintError,
    Overloaded,
    StalenessExceeded,
    TrajectoryClosed,
    TrajectoryVersionChanged,
)

PROBLEM = "urn:hoofprint:error:"
_RESERVED = frozenset({"message", "type", "code", "param", "title", "status", "detail"})


def render_error(error: HoofprintError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and extra headers."""
    status = error.http_status
    facts = {key: value for key, value in error.detail.items() if key not in _RESERVED}
    body = {
        "message": error.message,
        "type": _openai_type(status),
        "code": error.code,
        "param": error.detail.get("field"),
        "title": (type(error).__doc__ or error.code).partition("\n")[0].partition(";")[0],
        "status": status,
        "detail": error.message,
        "instance": PROBLEM + error.code,
        **facts,
    }
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    elif error.retryable and status == 503:
        headers["retry-after"] = "1"
    if isinstance(error, StalenessExceeded | TrajectoryVersionChanged | TrajectoryClosed):
        headers["x-should-retry"] = "false"  # the official SDKs obey it; what has ended stays so
    return status, {"error": body}, headers


def _openai_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 429:
            return "rate_limit_error"
        case s if s >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"
