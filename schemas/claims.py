"""Claims and epochs of a session (design §5): which of its events count, judged in log order of its partition.

A claim counts iff its epoch is above the session's. From then on events of a lower epoch that come later are void, ends
included; what came before stays, unless the claim says `restart`: then it is void, too. An event above the session's
epoch is its own claim. The judgement comes before the deduplication by `event_id`.
"""

from __future__ import annotations

from typing import Literal

from schemas.events import SessionClaimed, SessionEvent

Standing = Literal["valid", "void", "restart"]
NO_EPOCH = -1  # of a session that nobody has claimed yet


def standing(event: SessionEvent, epoch: int) -> Standing:
    """How the event stands in a session whose highest epoch so far is `epoch`.

    `valid` and `restart` make the event's epoch the session's. A repeated claim is void: it changes nothing.
    """
    if isinstance(event, SessionClaimed):
        if event.epoch <= epoch:
            return "void"
        return "restart" if event.restart else "valid"
    return "void" if event.epoch < epoch else "valid"
