"""Which payload files may go: the rule case by case, and over generated logs."""

from __future__ import annotations

import pytest

from analytics.retention import ORPHAN_AGE_US, Ages, Fate, orphaned, spent
from journal.payloads import StoredPayload

NOW = 10 * ORPHAN_AGE_US
GRACE, SESSION = 100, 1000
OLD, YOUNG = NOW - SESSION, NOW - GRACE + 1
USED = NOW - GRACE


@pytest.mark.parametrize(
    ("fate", "modified_at", "covered", "goes"),
    [
        ("over", USED, None, True),
        ("over", YOUNG, None, False),
        ("open", OLD, 100, False),  # pending, or running: its verdict is still to come
        (5, OLD, None, False),
        (5, OLD, 4, False),
        (5, USED, 5, True),
        (5, YOUNG, 5, False),
        (None, USED, 5, False),  # of a session that may be taken up again
        (None, OLD, None, True),
    ],
)
def test_a_file_goes_when_nobody_can_need_it(
    fate: Fate | None, modified_at: int, covered: int | None, goes: bool
) -> None:
    file = StoredPayload("r/g/0/digest", 1, modified_at)
    assert list(spent([file], lambda _: fate, covered, Ages(GRACE, SESSION), NOW)) == ([file] if goes else [])


@pytest.mark.parametrize(
    ("age", "named", "goes"),
    [(ORPHAN_AGE_US, False, True), (ORPHAN_AGE_US - 1, False, False), (NOW, True, False)],
)
def test_a_file_that_nobody_names_goes_after_a_day(age: int, named: bool, goes: bool) -> None:
    """Its event may be on its way until then."""
    file = StoredPayload("r/g/0/digest", 1, NOW - age)
    assert list(orphaned([file], {file.uri} if named else (), NOW)) == ([file] if goes else [])
