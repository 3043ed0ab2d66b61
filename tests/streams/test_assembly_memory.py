"""What open trajectories cost in memory (field case F15: thousands of long rollouts held as Python objects).

Measured through the worker, from raw records on, in bytes of the whole interpreter: 4 bytes per token and column are the
recorded columns themselves (context ids, output ids, log-probs of the output); what is around them does not grow with tokens.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from assembler_sessions import RUN, Session
from test_assembler_worker import Raw

from journal.payloads import PayloadStore
from schemas import events as ev
from schemas.codec import encode
from streams.assembler_worker import AssemblerWorker
from streams.assembly import AssemblyRules
from streams.assembly_closed import ClosedAttempts

SIZE, GROUPS, TOKENS = 8, 125, 2048
COLUMNS = 4 * (TOKENS // 4) + 2 * 4 * (TOKENS * 3 // 4)
"""Bytes per trajectory: a quarter of the tokens is context, the rest output with its log-probs."""
AROUND = 6_000
"""Bytes per trajectory for everything else: ids, spans, the segment and its place, whatever its length."""


class Sent:
    """Takes every event and acknowledges it at once."""

    def post(self, event: ev.Event, on_outcome: Callable[[object], None]) -> None:
        on_outcome(object())


def records(groups: int, tokens: int, *, ends: bool) -> list[Raw]:
    """Trajectories of one segment, without their ends or these alone."""
    values: list[bytes] = []
    for number in range(groups):
        for sample in range(SIZE):
            session = Session(f"g{number}", sample)
            context, output = list(range(tokens // 4)), list(range(tokens * 3 // 4))
            values.append(encode(session.end(1) if ends else session.segment(0, context, output)))
    return [Raw(offset, value) for offset, value in enumerate(values, len(values) if ends else 0)]


def assembler(root: Path) -> AssemblerWorker:
    rules = AssemblyRules(RUN, SIZE, 10**15, 0)
    return AssemblerWorker(
        rules, ClosedAttempts(RUN), PayloadStore(str(root)), Sent(), lambda: 0, lambda _: None
    )  # type: ignore[arg-type]


def held(worker: AssemblerWorker, groups: int, tokens: int) -> int:
    """Bytes that the worker holds more once it has the open trajectories. The records themselves are gone by then."""
    before = traced()
    for record in records(groups, tokens, ends=False):
        worker.handle(0, [record])
    del record
    return traced() - before


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_f15_a_thousand_open_trajectories_cost_four_bytes_per_token_and_column(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        worker = assembler(tmp_path)
        per_trajectory = held(worker, GROUPS, TOKENS) / (GROUPS * SIZE)
    finally:
        tracemalloc.stop()
    assert worker.open_groups == GROUPS
    assert COLUMNS <= per_trajectory <= COLUMNS + AROUND


def test_f15_what_is_around_the_columns_does_not_grow_with_tokens(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        short, long = (held(assembler(tmp_path / str(n)), 10, n) / (10 * SIZE) for n in (TOKENS, 16 * TOKENS))
    finally:
        tracemalloc.stop()
    assert long - short <= 15 * COLUMNS * 1.02


def test_f15_complete_groups_are_in_files_and_no_longer_in_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        worker = assembler(tmp_path)
        before = traced()
        grown = held(worker, GROUPS, TOKENS)
        worker.handle(0, records(GROUPS, TOKENS, ends=True))
        worker.low_water(0)  # takes the acknowledgements in
        left = traced() - before
    finally:
        tracemalloc.stop()
    assert worker.open_groups == 0
    assert len(list(PayloadStore(str(tmp_path)).list(RUN))) == GROUPS
    assert left < grown / 50
