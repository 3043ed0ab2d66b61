"""Which payload files may be deleted (design §5): the rule alone, over what the archive says. Pure.

* A file that an archived event refers to goes when its attempt needs it no more: the attempt is over without training
  (dropped, or tried again), or every checkpoint that the trainer keeps covers the step that trained on it. The newest
  checkpoint alone would not do: one that turns out to be damaged is passed over for an older one, and the batches
  behind that are trained again.
* A file of no group (`free`, `eval`, never admitted) goes when no session can be taken up from the log any more.
* A file that no archived event refers to goes after a day, whatever its attempt: its event may still be on its way.

A file younger than `grace_us` stays in any case. What an attempt needs while it is open is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from journal.payloads import StoredPayload

ORPHAN_AGE_US = 24 * 3600 * 1_000_000
Fate = Literal["open", "over"] | int
"""Of an attempt: it may still be trained on; nobody will; or the step whose batch holds it."""


@dataclass(frozen=True, slots=True)
class Ages:
    """Microseconds. `grace_us`: every file stays so long. `session_us`: how far back a session is looked for in the log."""

    grace_us: int
    session_us: int


def place_of(uri: str) -> str:
    """`<group>/<attempt>` of a file: all that an attempt wrote lies together."""
    return "/".join(PurePosixPath(uri).parts[1:3])


def spent(
    stored: Iterable[StoredPayload],
    fate_of: Callable[[StoredPayload], Fate | None],
    covered_step: int | None,
    ages: Ages,
    now_us: int,
) -> Iterator[StoredPayload]:
    """Files that nobody needs if an archived event refers to them; `orphaned` decides of the others.

    `fate_of`: of the attempt that a file belongs to; `covered_step`: what every kept checkpoint holds, None: nothing.
    """
    for payload in stored:
        fate, age = fate_of(payload), now_us - payload.modified_at
        if age < ages.grace_us or fate == "open":
            continue
        if fate is None:
            over = age >= ages.session_us
        else:
            over = fate == "over" or (covered_step is not None and int(fate) <= covered_step)
        if over:
            yield payload


def orphaned(
    stored: Iterable[StoredPayload], referenced: Collection[str], now_us: int
) -> Iterator[StoredPayload]:
    """Files of which the archive knows nothing, a day after they were written."""
    for payload in stored:
        if payload.uri not in referenced and now_us - payload.modified_at >= ORPHAN_AGE_US:
            yield payload
