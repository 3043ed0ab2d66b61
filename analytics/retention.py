"""Which payload files may be deleted: the rule alone. Nobody runs it by default; the archive needs payloads for replay.

A group's payload goes when its completion is archived and its group was dropped, or when a durable checkpoint covers the
step that trained it. A file that no archived event refers to goes after a day: its event may still be on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from journal.payloads import StoredPayload

ORPHAN_AGE_US = 24 * 3600 * 1_000_000


class PayloadFate(msgspec.Struct, frozen=True):
    """What the archive knows about the attempt that a payload belongs to. `step`: of the batch that holds it."""

    dropped: bool
    step: int | None = None


def deletable(
    stored: Iterable[StoredPayload],
    referenced: Mapping[str, PayloadFate],
    checkpoint_step: int | None,
    now_us: int,
) -> Iterator[StoredPayload]:
    """Files that may go. `referenced`: uri to fate, from archived events; `checkpoint_step`: newest durable step."""
    for payload in stored:
        fate = referenced.get(payload.uri)
        if fate is None:
            if now_us - payload.modified_at >= ORPHAN_AGE_US:
                yield payload
        elif fate.dropped or (
            fate.step is not None and checkpoint_step is not None and fate.step <= checkpoint_step
        ):
            yield payload
