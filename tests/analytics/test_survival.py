"""F8: survival by length and by prompt, over a run whose fates are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_run import small_run

from analytics.sql import run_query


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("run")).write()


def test_survival_by_length_is_of_the_attempt_that_was_decided(run_dir: Path) -> None:
    """g0 and g1 have 5 tokens, g2 has 4, g3 (stale) 2, and g4's second attempt 2."""
    columns = ("up_to_tokens", "groups", "kept", "stale", "dropped_otherwise", "retries", "survival")
    rows = [
        tuple(row[name] for name in columns) for row in run_query(run_dir, "survival_by_length").to_pylist()
    ]
    assert rows == [(2, 2, 1, 1, 0, 1, 0.5), (4, 1, 1, 0, 0, 0, 1.0), (8, 2, 2, 0, 0, 0, 1.0)]


def test_survival_by_prompt_names_the_worst_first(run_dir: Path) -> None:
    rows = run_query(run_dir, "survival_by_prompt").to_pylist()
    assert [(row["prompt_index"], row["survival"], row["retries"]) for row in rows] == [
        (3, 0.0, 0),
        (4, 1.0, 1),
        (0, 1.0, 0),
        (1, 1.0, 0),
        (2, 1.0, 0),
    ]
