"""What every event carries, and references to payloads."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeVar

import msgspec

from schemas.ids import stable_id

Kind = Literal["train", "eval", "free"]


class PayloadRef(msgspec.Struct, frozen=True, gc=False):
    """Bytes in the payload store. `uri` is relative to the store's root: `<run>/<group>/<attempt>/<sha256>`."""

    uri: str
    sha256: str
    size: int
    codec: str


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What every event carries."""

    IDENTITY: ClassVar[tuple[str, ...]] = ()
    event_id: str = ""
    run_id: str
    kind: Kind = "train"
    policy_id: str = "main"
    occurred_at: int


E = TypeVar("E", bound=Event)


def identified(event: E) -> E:
    """The same event with its deterministic `event_id`."""
    parts = [getattr(event, name) for name in event.IDENTITY]
    return msgspec.structs.replace(event, event_id=stable_id(type(event).__name__, event.run_id, *parts))
