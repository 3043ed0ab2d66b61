"""Which payload files may go: the rule, case by case."""

from __future__ import annotations

import pytest

from analytics.retention import ORPHAN_AGE_US, PayloadFate, deletable
from journal.payloads import StoredPayload

NOW = 10 * ORPHAN_AGE_US
OLD, YOUNG = NOW - ORPHAN_AGE_US, NOW - ORPHAN_AGE_US + 1


@pytest.mark.parametrize(
    ("fate", "modified_at", "checkpoint", "goes"),
    [
        (PayloadFate(dropped=True), YOUNG, None, True),
        (PayloadFate(dropped=False), OLD, 100, False),  # pending: its verdict is still to come
        (PayloadFate(dropped=False, step=5), OLD, None, False),
        (PayloadFate(dropped=False, step=5), OLD, 4, False),
        (PayloadFate(dropped=False, step=5), OLD, 5, True),
        (None, YOUNG, 5, False),  # its event may be on its way
        (None, OLD, 5, True),
    ],
)
def test_a_payload_goes_when_nobody_can_need_it(
    fate: PayloadFate | None, modified_at: int, checkpoint: int | None, goes: bool
) -> None:
    file = StoredPayload("r/g/0/digest", 1, modified_at)
    known = {} if fate is None else {file.uri: fate}
    assert list(deletable([file], known, checkpoint, NOW)) == ([file] if goes else [])
