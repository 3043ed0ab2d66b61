"""Version spans and finish reasons of one request, as pure bookkeeping."""

from __future__ import annotations

import pytest

from stack.engine.generation import Generation
from stack.engine.sampling import Sampling


def generation(max_new_tokens: int = 10, end_ids: frozenset[int] = frozenset()) -> Generation:
    return Generation("r", [1, 2], Sampling(max_new_tokens=max_new_tokens), 0, end_ids)


def span(version: str, start: int, end: int) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("history", "spans"),
    [
        ([], []),
        (["a", 3], [span("a", 0, 3)]),
        (["a", 3, "b", 2], [span("a", 0, 3), span("b", 3, 5)]),
        (["a", "b", 2], [span("b", 0, 2)]),
        (["a", 1, "a", 1], [span("a", 0, 2)]),
        (["a", 1, "b", "c", 1], [span("a", 0, 1), span("c", 1, 2)]),
        (["a", 1, "b", "a", 1], [span("a", 0, 2)]),
    ],
)
def test_spans(history: list[str | int], spans: list[dict[str, object]]) -> None:
    g = generation()
    for step in history:
        if isinstance(step, str):
            g.enter_version(step)
        else:
            for _ in range(step):
                g.append(0, -1.0)
    assert g.version_spans() == spans


def test_an_end_token_that_is_the_last_permitted_one_ends_as_stop() -> None:
    g = generation(max_new_tokens=1, end_ids=frozenset({4}))
    g.append(4, -1.0)
    assert g.finish_reason == {"type": "stop", "matched": 4}


def test_an_end_token_stops_and_stays_in_the_output() -> None:
    g = generation(end_ids=frozenset({4}))
    g.append(3, -1.0)
    g.append(4, -1.0)
    assert (g.output_ids, g.finish_reason) == ([3, 4], {"type": "stop", "matched": 4})


def test_logits_that_are_not_finite_end_as_an_internal_failure() -> None:
    g = generation()
    g.append(0, float("nan"))
    assert g.finish_reason is not None
    assert (g.finish_reason["type"], g.finish_reason["status_code"]) == ("abort", 500)
