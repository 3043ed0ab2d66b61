"""Relations of the domain over an archive whose truth is known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from analytics_events import AT, RUN, admitted, published, segment
from rich.console import Console
from synthetic_run import group_name, small_run, write_archive

from analytics.catalog import connect, query_names
from analytics.sql import execute, rich_table, run_query, sql_shell
from schemas import events as ev
from schemas import ids
from schemas.errors import ArchiveError


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("run")).write(snapshots=2)


def rows(run_dir: Path, query: str) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in run_query(run_dir, query).to_pylist()]


def test_versions_have_the_rank_of_their_publication(run_dir: Path) -> None:
    assert rows(run_dir, "SELECT ordinal, version, step FROM versions ORDER BY ordinal") == [
        (0, "v0", 0),
        (1, "v1", 1),
        (2, "v2", 2),
    ]


def test_spans_are_one_row_each_with_their_tokens(run_dir: Path) -> None:
    query = f"""SELECT segment_index, version, ordinal, "start", "stop", tokens FROM version_spans
                WHERE group_id = '{group_name(2)}' AND sample_index = 1 ORDER BY segment_index, span_index"""
    assert rows(run_dir, query) == [(0, "v0", 0, 0, 2, 2), (0, "v1", 1, 2, 4, 2)]


def test_groups_have_their_fate(run_dir: Path) -> None:
    query = "SELECT prompt_index, attempts, outcome, reason, retry_reasons FROM groups ORDER BY prompt_index"
    assert rows(run_dir, query) == [
        (0, 1, "kept", "trained", []),
        (1, 1, "kept", "trained", []),
        (2, 1, "kept", "trained", []),
        (3, 1, "dropped", "stale", []),
        (4, 2, "kept", "trained", ["trajectory_failed"]),
    ]


def test_batches_count_what_they_hold(run_dir: Path) -> None:
    query = (
        "SELECT step, group_count, sequences, trainable_tokens, current_version FROM batches ORDER BY step"
    )
    assert rows(run_dir, query) == [(1, 2, 4, 20, "v0"), (2, 2, 4, 12, "v2")]


def test_trajectories_know_span_end_and_reward(run_dir: Path) -> None:
    query = f"""SELECT segments, output_tokens, version_span, preemptions, status, reward FROM trajectories
                WHERE group_id IN ('{group_name(0)}', '{group_name(2)}') ORDER BY group_id, sample_index"""
    assert rows(run_dir, query) == [
        (2, 5, 1, 0, "completed", 0.0),
        (2, 5, 1, 0, "completed", 1.0),
        (1, 4, 2, 1, "completed", 0.0),
        (1, 4, 2, 1, "completed", 0.0),
    ]


def test_drift_by_lag(run_dir: Path) -> None:
    found = [
        (row["lag"], row["tokens"], row["mean"], row["max_abs"])
        for row in run_query(run_dir, "drift_by_lag").to_pylist()
    ]
    assert found == [(0, 24, 0.0, 0.0), (1, 8, 0.25, 0.25)]


@pytest.mark.parametrize("name", ["drift_by_lag", "group_fate", "version_spans"])
def test_named_queries_answer(run_dir: Path, name: str) -> None:
    assert name in query_names()
    assert run_query(run_dir, name).num_rows > 0


def test_a_fact_that_stands_twice_in_the_log_is_one_row_the_first(tmp_path: Path) -> None:
    write_archive(tmp_path, [published("v0"), admitted("g"), published("v0"), admitted("g")])
    connection = connect(tmp_path)
    assert execute(connection, "SELECT kafka_offset FROM group_admitted").to_pylist() == [{"kafka_offset": 1}]
    assert execute(connection, "SELECT count(*) AS n FROM log_control").to_pylist() == [{"n": 4}]


def claim(epoch: int, *, restart: bool = False) -> ev.SessionClaimed:
    trajectory = ids.parent_traj_id(RUN, "g", 0, 0)
    return ev.identified(
        ev.SessionClaimed(
            run_id=RUN, occurred_at=AT, session_id=trajectory, epoch=epoch, parent_traj_id=trajectory, group_id="g", attempt=0,
            sample_index=0, claimant="p", restart=restart,
        )
    )  # fmt: skip


def live(tmp_path: Path, events: list[ev.Event]) -> list[tuple[object, ...]]:
    write_archive(tmp_path, events)
    return rows(tmp_path, "SELECT segment_index, epoch, abandoned FROM live_segments ORDER BY segment_index")


def test_events_of_an_older_epoch_are_void_after_the_claim_only(tmp_path: Path) -> None:
    events = [claim(1), segment("g", 0, 0), claim(2), segment("g", 0, 1), segment("g", 0, 1, epoch=2)]
    assert live(tmp_path, events) == [(0, 1, False), (1, 2, False)]


def test_a_restart_voids_what_went_before_and_a_late_claim_of_a_lower_epoch_voids_nothing(
    tmp_path: Path,
) -> None:
    events = [
        claim(1), segment("g", 0, 0), segment("g", 0, 1), claim(5, restart=True), segment("g", 0, 0, epoch=5),
        claim(3, restart=True), segment("g", 0, 1, epoch=5),
    ]  # fmt: skip
    assert live(tmp_path, events) == [(0, 5, False), (1, 5, False)]


def test_a_turn_whose_request_came_again_after_its_end_is_abandoned(tmp_path: Path) -> None:
    events: list[ev.Event] = [
        segment("g", 0, 0, digest="same", received_at=AT),
        segment("g", 0, 1, digest="same", received_at=AT + 1000),
        segment("g", 0, 2, digest="other", received_at=AT + 2000),
    ]
    assert live(tmp_path, events) == [(0, 1, True), (1, 1, False), (2, 1, False)]


def test_the_shell_answers_names_and_statements_and_survives_errors(run_dir: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=160)
    sql_shell(
        run_dir,
        console,
        ["group_fate", "SELECT nonsense;", "SELECT 41 + 1", "AS answer;", "exit", "SELECT 7;"],
    )
    shown = out.getvalue()
    assert "trained" in shown
    assert "the query failed" in shown
    assert "42" in shown
    assert "7" not in shown.split("42")[1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("'group-0'::BLOB", "group-0"),
        ("'\\xC3\\x01\\xFF'::BLOB", "0xc301ff (3 bytes)"),
        ("repeat('\\x00'::BLOB::VARCHAR, 40)::BLOB", f"0x{'00' * 32}… (40 bytes)"),
        ("[{'key': 'a', 'value': '\\x01'::BLOB}]", "[{'key': 'a', 'value': '0x01 (1 bytes)'}]"),
        ("'[/not] [red]markup'", "[/not] [red]markup"),
        ("chr(27) || '[2J'", "␛[2J"),
    ],
)
def test_a_cell_shows_bytes_as_text_or_hexadecimal_and_obeys_nobody(
    run_dir: Path, value: str, shown: str
) -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(rich_table(run_query(run_dir, f"SELECT {value} AS cell")))
    assert out.getvalue().splitlines()[3].strip("│ ") == shown


def test_without_an_archive_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no archive at"):
        run_query(tmp_path, "SELECT 1")
