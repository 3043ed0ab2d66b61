"""The named query `lag_split`: the lag of trained tokens, by where its versions were published."""

from __future__ import annotations

from pathlib import Path

import msgspec
from analytics_events import RUN, admitted, published
from synthetic_run import group_name, small_run, write_archive

from analytics.sql import run_query
from schemas import events as ev
from schemas import ids
from schemas.tokens import pack_ids, pack_logprobs


def completed(group: str) -> ev.GroupCompleted:
    ref = ev.PayloadRef("u", "00", 1, "c")
    return ev.identified(
        ev.GroupCompleted(
            run_id=RUN,
            occurred_at=1,
            group_id=group,
            attempt=0,
            payload=ref,
            sequences=1,
            trainable_tokens=3,
            trajectories=(),
        )
    )


def batch(step: int, cause: int) -> ev.TrainBatch:
    return ev.identified(
        ev.TrainBatch(
            run_id=RUN, occurred_at=1, cause_offset=cause, index=0, batch_id=ids.batch_id(RUN, step), step=step, groups=(),
            current_version="", cutoff_version="", window=(),
        )
    )  # fmt: skip


def feedback(group: str, step: int, version: str, lags: list[int]) -> ev.SequenceFeedback:
    logprobs = pack_logprobs([-0.5] * len(lags))
    return ev.identified(
        ev.SequenceFeedback(
            run_id=RUN, occurred_at=1, batch_id=ids.batch_id(RUN, step), step=step, group_id=group, attempt=0,
            parent_traj_id=group, sample_index=0, lineage_id="l", version=version, reward=1.0, advantage=0.0,
            trainer_logprobs=logprobs, rollout_logprobs=logprobs, lag=pack_ids(lags), ratio_mean=1.0, clip_fraction=0.0,
        )
    )  # fmt: skip


def test_each_version_between_a_token_and_its_training_is_counted_where_it_was_published(
    tmp_path: Path,
) -> None:
    """Tokens of v0 and v1; completed under v1, emitted under v3, trained on v4. One of lag -1 has none."""
    control: list[ev.Event] = [
        published("v0"), admitted("g"), published("v1"), completed("g"), published("v2"), published("v3"),
        ev.identified(ev.BatchRequested(run_id=RUN, occurred_at=1, step=1, batch_id=ids.batch_id(RUN, 1))), published("v4"),
    ]  # fmt: skip
    write_archive(tmp_path, [*control, batch(1, 6), feedback("g", 1, "v4", [4, 3, 3, -1])])
    (row,) = run_query(tmp_path, "lag_split").to_pylist()
    third = 1 / 3
    assert row == {
        "step": 1, "tokens": 3, "lag": 10 / 3, "in_flight": third, "in_queue": 2.0, "at_training": 1.0,
    }  # fmt: skip


def test_the_parts_add_up_to_the_lag_in_a_run_of_the_fold(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    run.events = [
        msgspec.structs.replace(event, version={1: "v0", 2: "v2"}[event.step], lag=_lag(event))
        if isinstance(event, ev.SequenceFeedback)
        else event
        for event in run.events
    ]
    rows = run_query(run.write(), "lag_split").to_pylist()
    assert [(row["step"], row["in_flight"], row["in_queue"], row["at_training"]) for row in rows] == [
        (1, 0.0, 0.0, 0.0),
        (2, 1 / 3, 2 / 3, 0.0),
    ]
    assert all(row["lag"] == row["in_flight"] + row["in_queue"] + row["at_training"] for row in rows)


def _lag(event: ev.SequenceFeedback) -> bytes:
    """g2: two tokens of v0, two of v1, trained on v2; all others of the version they were trained on."""
    return pack_ids([2, 2, 1, 1]) if event.group_id == group_name(2) else event.lag
