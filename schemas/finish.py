"""Rule 9: what a chunk's finish reason means while weights are being updated.

A chunk that ended by itself is complete even if an abort was in flight; only finish `abort` is preempted. A budget that
is used up at a preemption ends as `length`, never as `stop`, and needs no resume.
"""

from __future__ import annotations

from typing import Literal

Decision = Literal["complete", "resume", "length"]
SELF_ENDED = frozenset({"stop", "length", "tool_calls"})


def decide(finish_type: str | None, tokens_left: int) -> Decision:
    """`complete`: the chunk ended by itself. `resume`: it was preempted. `length`: preempted with nothing left to do.

    `tokens_left`: what remains of the budget (min of max_tokens and context window) after this chunk's tokens.
    """
    if finish_type in SELF_ENDED:
        return "complete"
    return "resume" if tokens_left > 0 else "length"
