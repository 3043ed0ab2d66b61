"""SGLang's stream of one generation, as tokens. Pure: bytes in, state out.

Two modes exist and are told apart by `completion_tokens`: cumulative (every event has all output so far, the latest wins)
and incremental (every event has what is new). In cumulative mode an event is parsed only when somebody looks, so a
reply nobody streams costs one parse. Invariants: a token is taken once (an abort in the waiting queue re-sends the last
token in incremental mode, so what goes beyond `completion_tokens` is cut); a token has the label of its weights or
`unknown`, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from proxy.output import Output
from schemas.errors import EngineRejected, EngineUnavailable, UpstreamError
from schemas.versions import UNKNOWN, real_version, spans_of_reply

Mode = Literal["cumulative", "incremental"]


class ChunkReader:
    """One engine call, appending to `output`. `mode`: what is known of the engine; `label`: of its weights at dispatch."""

    def __init__(self, mode: Mode | None, output: Output | None = None, label: str = "") -> None:
        self.mode = mode
        self.output = Output() if output is None else output
        self.meta: Mapping[str, Any] = {}
        self.finish: Mapping[str, Any] | None = None
        self.span_mismatch = False
        self.changes = 0
        """How often the weights changed under this call, as its end tells."""
        self.done = False
        self._label = label
        self._first = len(self.output.ids)
        self._text = self.output.text
        self._buffer = b""
        self._pending: bytes | None = None

    @property
    def count(self) -> int:
        """Tokens of this call that were taken."""
        return len(self.output.ids) - self._first

    def feed(self, data: bytes) -> bool:
        """Bytes from the engine; whether there is something new. UpstreamError: the engine says so itself."""
        *lines, self._buffer = (self._buffer + data if self._buffer else data).split(b"\n")
        told = False
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # the empty line between two events, or a comment
            told = True
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
            else:
                self._take(payload)
        if self.done:
            self.settle()
        return told

    def settle(self) -> None:
        """Parse what was put off."""
        if self._pending is not None:
            raw, self._pending = self._pending, None
            self._parse(raw)

    def stop(self, length: int, finish: Mapping[str, Any]) -> None:
        """The output ends with its first `length` tokens, whatever the engine still says of this call."""
        self.output.cut(length)
        self._pending = None
        self.meta = {
            key: value for key, value in self.meta.items() if key != "routed_experts"
        }  # of more tokens
        self.finish, self.done = finish, True

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
        known, total = self.count, int(meta.get("completion_tokens", 0))
        ids: Sequence[int] = event.get("output_ids") or ()
        if self.mode is None and known and total > known:
            self.mode = "cumulative" if len(ids) == total else "incremental"
        # all output so far, of which we know the head; or what is new, which ends at the total
        whole = self.mode != "incremental" and len(ids) >= total
        first = known if whole else max(0, len(ids) - (total - known))
        if known + len(ids) - first < total:
            self.mode = None
            raise EngineUnavailable("the engine left out tokens of its stream", known=known, total=total)
        self._append(ids, meta, first)
        self.meta = meta
        text = event.get("text", "")
        self.output.text = self._text + text if len(ids) >= total else self.output.text + text
        self.finish = meta.get("finish_reason")
        if self.finish is not None:
            self._close(meta)

    def _append(self, ids: Sequence[int], meta: Mapping[str, Any], first: int) -> None:
        output, new = self.output, len(ids) - first
        if new <= 0:
            return
        triples, tops = meta.get("output_token_logprobs") or (), meta.get("output_top_logprobs") or ()
        logprobs = [triple[0] for triple in triples[first + len(triples) - len(ids) :]]
        if tops:
            output.tops.extend(tops[first + len(tops) - len(ids) :])
        label = real_version(meta.get("weight_version")) or UNKNOWN
        # several tokens in one event, and other weights than before it: nobody knows where they changed
        output.extend(ids[first:], logprobs, label if new == 1 or self._label in ("", label) else UNKNOWN)
        self._label = label

    def _close(self, meta: Mapping[str, Any]) -> None:
        """The engine's own spans replace what its events said on the way."""
        spans, self.span_mismatch = spans_of_reply(meta, self.count)
        self.output.label_from(self._first, spans)
        self.changes = max(0, len(spans) - 1)


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
