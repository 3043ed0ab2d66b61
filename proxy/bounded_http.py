"""uvicorn's HTTP protocol with a bound on what it holds before a request begins, a way to cut a client off, and one system
call for an answer's head and body where uvicorn makes two.

uvicorn's fast parser collects headers without a limit. Invariants: of a head that is not complete at most
`MAX_HEAD_BYTES` and one read of the socket are held; a connection that is cut off keeps no unsent bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
CONNECTION = "hoofprint.connection"
"""Key in the scope: the connection that the call came through."""
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class OneWrite:
    """A transport that can hold back what is written. Invariant: nothing written stays behind when it is closed."""

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
            self._transport.write(b"".join(held))

    def write(self, data: bytes) -> None:
        """Now, or with what follows."""
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

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

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(OneWrite(transport))  # type: ignore[arg-type]

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
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_REFUSAL)
                self.transport.close()
