"""Who lags and does not move is started anew."""

from __future__ import annotations

import pytest

from schemas.errors import TransportError
from schemas.settings import KafkaSettings
from streams.assembler_watchdog import Watchdog


def watchdog(at: dict[int, int | None], publish_timeout_s: float = 20) -> Watchdog:
    return Watchdog(KafkaSettings(publish_timeout_s=publish_timeout_s), at.get)


def test_a_partition_that_stands_still_before_records_is_reported() -> None:
    dog = watchdog({0: 5})
    dog.judge({0: (0, 9)}, {0: 5}, now=0)
    dog.judge({0: (0, 9)}, {0: 5}, now=30)
    with pytest.raises(TransportError, match="partition 0"):
        dog.judge({0: (0, 9)}, {0: 5}, now=31)


def test_one_that_may_still_wait_for_an_acknowledgement_is_not() -> None:
    patient = watchdog({0: 5}, publish_timeout_s=60)
    patient.judge({0: (0, 9)}, {0: 5}, now=0)
    patient.judge({0: (0, 9)}, {0: 5}, now=70)
    with pytest.raises(TransportError):
        patient.judge({0: (0, 9)}, {0: 5}, now=71)


def test_one_that_moves_is_not() -> None:
    at: dict[int, int | None] = {0: 5}
    dog = watchdog(at)
    for now in range(0, 600, 50):
        dog.judge({0: (0, 1000)}, {0: 5}, now)
        at[0] = now


def test_one_that_has_read_everything_is_not() -> None:
    dog = watchdog({0: 9})
    for now in (0, 100, 200):
        dog.judge({0: (0, 9)}, {0: 5}, now)


def test_before_the_first_record_the_committed_mark_says_whether_there_are_any() -> None:
    quiet = watchdog({})
    for now in (0, 100):
        quiet.judge({0: (0, 9)}, {0: 9}, now)
    stuck = watchdog({})
    stuck.judge({0: (0, 9)}, {0: None}, now=0)
    with pytest.raises(TransportError):
        stuck.judge({0: (0, 9)}, {0: None}, now=100)


def test_a_partition_that_went_to_another_worker_is_forgotten() -> None:
    dog = watchdog({0: 5})
    dog.judge({0: (0, 9)}, {0: 5}, now=0)
    dog.judge({0: (0, 9)}, {}, now=50)
    dog.judge({0: (0, 9)}, {0: 5}, now=100)


def test_a_partition_whose_records_were_all_deleted_has_nothing_to_hand_out() -> None:
    """The group's offsets may have expired as well: no mark, and no record left."""
    dog = watchdog({})
    for now in (0, 100):
        dog.judge({0: (9, 9)}, {0: None}, now)
