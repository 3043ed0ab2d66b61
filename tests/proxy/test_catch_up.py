"""When a failed catch-up is tried again: a pure rule of time."""

from __future__ import annotations

from proxy.catch_up import Backoff

V1, V2 = ("v1", "/v1"), ("v2", "/v2")


class Hands:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_first_try_is_due_and_failures_wait_twice_as_long_each_time_up_to_a_minute() -> None:
    backoff = Backoff(Hands())
    assert backoff.is_due(V1)
    assert [backoff.failed(V1) for _ in range(9)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_it_is_due_when_its_time_has_come_and_not_before() -> None:
    clock = Hands()
    backoff = Backoff(clock)
    backoff.failed(V1)
    backoff.failed(V1)
    clock.now += 1.99
    assert not backoff.is_due(V1)
    clock.now += 0.01
    assert backoff.is_due(V1)


def test_another_version_may_be_tried_at_once_and_counts_from_the_start() -> None:
    backoff = Backoff(Hands())
    for _ in range(5):
        backoff.failed(V1)
    assert backoff.is_due(V2)
    assert backoff.failed(V2) == 1.0
    assert not backoff.is_due(V2)


def test_success_forgets_the_failures() -> None:
    backoff = Backoff(Hands())
    backoff.failed(V1)
    backoff.succeeded()
    assert backoff.is_due(V1)
    assert backoff.failed(V1) == 1.0


def test_a_thousand_failures_are_no_overflow() -> None:
    backoff = Backoff(Hands())
    assert {backoff.failed(V1) for _ in range(1100)} >= {60.0}
