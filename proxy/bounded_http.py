"""uvicorn's HTTP protocol with a bound on what it holds before a request begins, a way to cut a client off, one system
call for an answer's head and body where uvicorn makes two, streams for HTTP/1.0, and an eye on clients that pipeline.

uvicorn's fast parser collects headers without a limit; it reads no more from a client that has sent a second request before
its first answer, and tells the last request alone that the client has gone. Invariants: of a head that is not complete at
most `MAX_HEAD_BYTES` and one read of the socket are held; a connection that is cut off keeps no unsent bytes; the request
that is being answered learns that its client has gone, also if up to `MAX_PIPELINED` others wait behind it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 65_536
MAX_PIPELINED = 16
"""Requests that are read while an earlier one is answered."""
CONNECTION = "hoofprint.connection"
"""Key in the scope: the connection that the call came through."""
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class OneWrite:
    """A transport that can hold back what is written. Invariants: nothing written stays behind when it is closed; what was held
    back for a client that has gone is dropped, where uvloop would raise."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        """Until `release`."""
        self._held = []

    def release(self) -> None:
        """Write what was held back, as one piece."""
        held, self._held = self._held, None
        if held:
            self.write(b"".join(held))

    def write(self, data: bytes) -> None:
        """Now, or with what follows."""
        if self._held is not None:
            self._held.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Behind everything written."""
        self.release()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttp(HttpToolsProtocol):
    """Give the class to `uvicorn.Config(http=…)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._earlier: list[RequestResponseCycle] = []
        """Requests before the last one whose answers are not out."""

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(OneWrite(transport))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: every request of it learns that, not only the last."""
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _unanswered(self) -> list[RequestResponseCycle]:
        """In the order in which they came; the first is being answered."""
        cycles = self._earlier if self.cycle is None else [*self._earlier, self.cycle]
        return [cycle for cycle in cycles if not cycle.response_complete]

    @property
    def is_answering(self) -> bool:
        """Whether a request waits for its answer, or for more of it."""
        return bool(self._unanswered())

    def unframed(self, size: int) -> None:
        """Of the answer to a client of HTTP/1.0, which knows no chunks, the next `size` bytes: it ends with the connection."""
        cycle = self._unanswered()[0]
        cycle.chunked_encoding, cycle.expected_content_length = False, size

    def hold(self) -> None:
        """Write nothing until `release`: what comes before it leaves together."""
        self.transport.hold()  # type: ignore[attr-defined]

    def release(self) -> None:
        """Write what was held back."""
        self.transport.release()  # type: ignore[attr-defined]

    @property
    def is_full(self) -> bool:
        """Whether more of the answer has to wait for its client."""
        return self.flow.write_paused

    def abort(self) -> None:
        """Drop the connection, unsent bytes too."""
        self.transport.abort()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._in_head = False
        self._earlier = self._unanswered()
        super().on_headers_complete()
        if self._earlier and len(self._earlier) <= MAX_PIPELINED:
            self.flow.resume_reading()  # who does not read does not see that the client goes

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                if not self.is_answering:  # else it would stand in the middle of an answer
                    self.transport.write(_REFUSAL)
                self.transport.close()
