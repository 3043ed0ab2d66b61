"""SGLang's stream of one generation, as tokens. Pure: bytes in, state out.

Two modes exist and are told apart by `completion_tokens`: cumulative (every event has all output so far, the latest wins)
and incremental (every event has what is new). In cumulative mode an event is parsed only when somebody looks, so a
reply nobody streams costs one parse. Invariant: a token is taken once. An abort in the waiting queue re-sends the last
token in incremental mode, so what goes beyond `completion_tokens` is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from schemas.errors import EngineRejected, EngineUnavailable, UpstreamError
from schemas.versions import UNKNOWN, VersionSpan, append_spans, real_version, spans_of_reply

Mode = Literal["cumulative", "incremental"]
_LISTS = ("output_token_logprobs", "output_top_logprobs")


class ChunkReader:
    """One engine call. `mode`: what is known of the engine; `eager`: parse every event (somebody streams)."""

    def __init__(self, mode: Mode | None, *, eager: bool) -> None:
        self.mode = mode
        self.eager = eager
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Any] = []
        self.meta: Mapping[str, Any] = {}
        self.text = ""
        self.finish: Mapping[str, Any] | None = None
        self.spans: list[VersionSpan] = []
        self.span_mismatch = False
        self.done = False
        self._seen: list[VersionSpan] = []
        self._buffer = b""
        self._pending: bytes | None = None

    def feed(self, data: bytes) -> bool:
        """Bytes from the engine; whether there is something new. UpstreamError: the engine says so itself."""
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        for raw in events:
            payload = raw.removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                self.done = True
            elif raw.startswith(b"data:"):
                self._take(payload)
        if self.eager or self.done:
            self.settle()
        return bool(events)

    def settle(self) -> None:
        """Parse what was put off."""
        if self._pending is not None:
            raw, self._pending = self._pending, None
            self._parse(raw)

    def _take(self, payload: bytes) -> None:
        if self.mode == "cumulative" and not payload.startswith(b'{"error"'):
            self._pending = payload  # the latest wins
        else:
            self._parse(payload)

    def _parse(self, payload: bytes) -> None:
        event = orjson.loads(payload)
        if "error" in event:
            raise refusal(event, 500)
        meta = event["meta_info"]
        known, total = len(self.output_ids), int(meta.get("completion_tokens", 0))
        ids: Sequence[int] = event.get("output_ids") or ()
        if self.mode is None and known and total > known:
            self.mode = "cumulative" if len(ids) == total else "incremental"
        # all output so far, of which we know the head; or what is new, which ends at the total
        whole = self.mode != "incremental" and len(ids) >= total
        first = known if whole else max(0, len(ids) - (total - known))
        if known + len(ids) - first < total:
            self.mode = None
            raise EngineUnavailable("the engine left out tokens of its stream", known=known, total=total)
        self._append(event, meta, ids, first)
        self.meta = meta
        self.text = event.get("text", "") if len(ids) >= total else self.text + event.get("text", "")
        self.finish = meta.get("finish_reason")
        if self.finish is not None:
            self.spans, self.span_mismatch = spans_of_reply(meta, len(self.output_ids))

    def _append(self, event: Any, meta: Mapping[str, Any], ids: Sequence[int], first: int) -> None:
        known = len(self.output_ids)
        self.output_ids.extend(ids[first:])
        triples, tops = (meta.get(name) or () for name in _LISTS)
        offset = len(triples) - len(ids)
        self.logprobs.extend(t[0] for t in triples[first + offset :])
        if tops:
            self.top_logprobs.extend(tops[first + len(tops) - len(ids) :])
        new = len(self.output_ids) - known
        if new:
            label = real_version(meta.get("weight_version")) or UNKNOWN
            self._seen = append_spans(self._seen, [VersionSpan(label, 0, new)], known)

    def spans_so_far(self) -> list[VersionSpan]:
        """The engine's own spans, or, for a call that broke off, what its events said on the way."""
        return self.spans if self.finish is not None else self._seen


def refusal(body: object, status: int) -> UpstreamError:
    """An engine's error body in either of SGLang's two shapes."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message, code = str(error.get("message") or error), error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else status
        if error.get("type") == "invalid_request_error" and status >= 500:
            status = 400
    else:
        message = str(error)
    if 400 <= status < 500:
        return EngineRejected(message, http_status=status)
    return EngineUnavailable(f"the engine failed: {message}")
