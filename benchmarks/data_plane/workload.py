"""The workload: GRPO groups of 8, steps of 32 groups, trajectories of so many tokens in so many turns.

A quarter of a turn's tokens is context, the rest output of two versions. Everything a turn carries is the same size for the
peers: ids, log-probs, versions, mask. Events are made before the clock runs: what is measured begins with their encoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schemas import events as ev
from schemas import ids
from schemas.versions import VersionSpan

RUN = "bench"
GROUP = 8
STEP = 32
VERSIONS = ("v000000", "v000001")
AT_ONCE = 64  # sessions that are under way together


@dataclass(frozen=True)
class Shape:
    """Of every trajectory of a round."""

    turns: int = 1
    tokens: int = 2048

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.turns} turn{'s' if self.turns > 1 else ''} of {self.tokens // self.turns:,}"


def group_ids(start: int, groups: int) -> list[str]:
    """Of groups `start` and after."""
    return [ids.group_id(RUN, 0, index) for index in range(start, start + groups)]


def trajectories(shape: Shape, names: list[str]) -> list[list[ev.TokenSegment]]:
    """Segments of each trajectory, in the groups' order; the first carries the start and the last one the end."""
    random = np.random.default_rng(0)
    made = time.time_ns() // 1000
    return [
        [_segment(shape, name, sample, turn, made, random) for turn in range(shape.turns)]
        for name in names
        for sample in range(GROUP)
    ]


def interleaved(sessions: list[list[ev.TokenSegment]], at_once: int = AT_ONCE) -> Iterator[ev.TokenSegment]:
    """As concurrent sessions write them: turn by turn over `at_once` sessions."""
    for start in range(0, len(sessions), at_once):
        for turn in zip(*sessions[start : start + at_once], strict=True):
            yield from turn


def _segment(
    shape: Shape, group: str, sample: int, turn: int, made: int, random: np.random.Generator
) -> ev.TokenSegment:
    traj = ids.parent_traj_id(RUN, group, 0, sample)
    size = shape.tokens // shape.turns
    context = size // 4
    output = size - context
    last = turn == shape.turns - 1
    return ev.identified(
        ev.TokenSegment(
            run_id=RUN, occurred_at=made + turn, session_id=traj, epoch=made, parent_traj_id=traj, group_id=group, attempt=0,
            sample_index=sample, segment_index=turn, lineage_id=ids.lineage_id(traj, 0),
            parent_segment_index=turn - 1 if turn else None, api="generate",
            context_ids=random.integers(0, 150_000, context, np.int32).tobytes(),
            output_ids=random.integers(0, 150_000, output, np.int32).tobytes(),
            output_logprobs=(-random.random(output, np.float32)).tobytes(),
            spans=(VersionSpan(VERSIONS[0], 0, output // 2), VersionSpan(VERSIONS[1], output // 2, output)),
            version_at_dispatch=VERSIONS[0], engine_id="engine-0", finish_reason="stop", request_digest=f"{turn:064x}",
            sampling='{"temperature": 1.0, "max_new_tokens": 1024}', prompt_tokens=context, received_at=made, first_token_at=made,
            done_at=made + turn, started=turn == 0,
            end=ev.EndFacts(shape.turns, "completed", "done", float(sample % 2)) if last else None,
        )
    )  # fmt: skip
