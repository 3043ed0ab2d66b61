"""A record that could not be used as a `DeadLetter`, whatever the record is: a letter always fits into a record itself. Pure.

A letter that cannot be written would end its writer at the same record for ever. So what is too large for it stays where
it was read, and the letter's reason says that it was cut. A header without a value becomes one with an empty value.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.events import DeadLetter, identified

_ROOM = 900_000
"""Bytes of key, headers and value together: brokers and clients take 1 MB a record unless they are told otherwise."""
_REASON = 2000
Headers = Iterable[tuple[str, bytes | None]]


def letter_of(
    run_id: str, topic: str, partition: int, offset: int, timestamp_ms: int, reason: str,
    key: bytes | None, value: bytes | None, headers: Headers = (),
) -> DeadLetter:  # fmt: skip
    """The letter of the record at this place. Of a header that is there twice, the last one is kept."""
    raw, kept_key = value or b"", None if key is None else key[:_ROOM]
    room = _ROOM - len(kept_key or b"")
    kept = {name: held or b"" for name, held in headers}
    size = sum(len(name.encode()) + len(held) for name, held in kept.items())
    if size > room:
        kept, size, whole = {}, 0, False
    else:
        whole = kept_key == key
    kept_raw = raw[: room - size]
    reason = reason[:_REASON]
    if not whole or len(kept_raw) < len(raw):
        reason += _cut(len(kept_raw), len(raw))
    return identified(
        DeadLetter(
            run_id=run_id, occurred_at=timestamp_ms * 1000, topic=topic, partition=partition, offset=offset,
            key=kept_key, headers=kept, reason=reason, raw=kept_raw,
        )
    )  # fmt: skip


def was_cut(letter: DeadLetter) -> bool:
    """Whether a letter holds a part of its record only, as its reason then says."""
    return letter.reason.endswith(" bytes)") and f"(first {len(letter.raw)} of " in letter.reason


def _cut(kept: int, size: int) -> str:
    return f" (first {kept} of {size} bytes)"
