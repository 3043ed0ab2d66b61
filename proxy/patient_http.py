"""The HTTP protocol with an end to its patience: uvicorn waits for the rest of a request for ever.

A client that connects owes a request. One that owes the head of a request, or the next piece of its body, for longer than
`patience_s` gets 408, if any of it had come, and loses the connection. Invariants: what waits on our side never counts (a
body that is not read, a request behind an answer that is not out yet); a request costs no timer, a connection has one. How
long a connection may be idle between two requests is uvicorn's `timeout_keep_alive`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.bounded_http import BoundedHttp

_PIECE_BYTES = 65_536
"""So much of a body must come within the patience, or its end: a byte now and then is not enough."""
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class PatientHttp(BoundedHttp):
    """Give `patient(seconds)` to `uvicorn.Config(http=…)`."""

    patience_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._piece_bytes = 0
        self._owed_since: float | None = None
        """Since when the client owes bytes; None: it owes nothing."""
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client is there, and owes a request."""
        super().connection_made(transport)
        self._owed_since = self.loop.time()
        self._watch = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._owed_since is None:  # behind another one, in the same read
            self._owed_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._piece_bytes = 0
        self._owed_since = self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._owed_since = None
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._owed_since is None:
            self._owed_since = self.loop.time()
        super().data_received(data)
        if self._owed_since is not None and not self._in_head:
            self._piece_bytes += len(data)
            if self._piece_bytes >= _PIECE_BYTES:
                self._piece_bytes = 0
                self._owed_since = self.loop.time()

    def _look(self) -> None:
        """One timer per connection, set anew when it has passed."""
        now = self.loop.time()
        if self._owed_since is not None and self._waits_for_us:
            self._owed_since = now
        left = self.patience_s - (0.0 if self._owed_since is None else now - self._owed_since)
        if left > 0:
            self._watch = self.loop.call_later(left, self._look)
        elif not self.transport.is_closing():
            if self._in_head or self.is_answering:
                self.transport.write(_TOO_SLOW)
            self.transport.close()

    @property
    def _waits_for_us(self) -> bool:
        waiting = len(self._unanswered()) + self._in_head
        return self.flow.read_paused or waiting > 1


def patient(seconds: float) -> type[PatientHttp]:
    """The protocol with this patience."""
    return type("PatientHttp", (PatientHttp,), {"patience_s": seconds})
