"""Folding the archived control log again gives the recorded effects, and notices when they are not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from analytics_events import RUN
from synthetic_run import small_run

from analytics.replay import verify
from analytics.whatif import whatif
from schemas import events as ev
from schemas.errors import ConfigError


def test_the_recorded_effects_come_out_byte_for_byte(tmp_path: Path) -> None:
    report = verify(small_run(tmp_path).write())
    assert report.ok
    assert (report.run_id, report.verdicts.recorded, report.batches.recorded) == (RUN, 6, 3)


def test_repeated_effects_are_the_same_effects(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    effects = run.effects()
    assert verify(run.write([*effects[:3], *effects])).ok


def test_a_changed_effect_is_found_where_it_stands(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    effects = run.effects()
    stale = next(i for i, e in enumerate(effects) if isinstance(e, ev.Verdict) and e.reason == "stale")
    effects[stale] = msgspec.structs.replace(effects[stale], gap_max=7)
    verdicts = [effect for effect in effects if isinstance(effect, ev.Verdict)]
    report = verify(run.write(effects))
    assert not report.ok
    assert report.batches.ok
    assert report.verdicts.difference is not None
    assert report.verdicts.difference.index == verdicts.index(effects[stale])
    assert '"gap_max":7' in (report.verdicts.difference.recorded or "")


@pytest.mark.parametrize("kept", [slice(0, -1), slice(1, None)])
def test_a_lost_effect_is_found(tmp_path: Path, kept: slice) -> None:
    run = small_run(tmp_path)
    assert not verify(run.write(run.effects()[kept])).ok


def test_what_if_folds_under_other_settings(tmp_path: Path) -> None:
    table = whatif(
        small_run(tmp_path).write(), {"window.keep_versions": [1, 2, 0], "batch.size": [2]}
    ).to_pylist()
    assert [(row["window.keep_versions"], row["batch.size"], row["kept"], row["stale"]) for row in table] == [
        (1, 2, 3, 2),  # g2 goes stale as well, and g4 leaves alone in a short batch
        (2, 2, 4, 1),
        (0, 2, 4, 0),  # g3 takes the place of g4, which the end of the run finds still waiting
    ]


@pytest.mark.parametrize("choice", [{"window.keep": [1]}, {"window.keep_versions": [-1]}])
def test_what_if_refuses_settings_that_are_none(tmp_path: Path, choice: dict[str, list[object]]) -> None:
    with pytest.raises(ConfigError):
        whatif(small_run(tmp_path).write(), choice)
