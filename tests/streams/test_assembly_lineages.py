"""Lineages to sequences, the trajectory's version (W3, W4), abandoned turns."""

from __future__ import annotations

import hashlib

import pytest
from assembler_runs import completed, feed, fresh
from assembler_sessions import Session

from schemas.tokens import pack_ids
from schemas.versions import VersionSpan
from streams.assembly_facts import abandoned, trajectory_version
from streams.assembly_lineages import TokenSequence


def rows_of(*events: object) -> list[TokenSequence]:
    return completed(feed(fresh(1), events)).sequences  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("segments", "version"),
    [
        pytest.param([(0, ["alpha"]), (2, ["gamma"]), (1, ["beta"])], "gamma", id="W3"),
        pytest.param([(0, ["alpha"]), (0, ["beta"])], "beta", id="W4"),
        pytest.param([(0, ["alpha"]), (1, ["unknown"])], "alpha", id="an unreal version hides nothing"),
        pytest.param([(0, ["alpha"]), (1, [])], "alpha", id="nor does an empty output"),
        pytest.param([(0, ["alpha", "beta", "-1"])], "beta", id="the end version is the last real one"),
        pytest.param([(0, [" alpha "])], "alpha", id="stripped"),
        pytest.param([(0, ["none"]), (1, [""])], "", id="no real version"),
        pytest.param([], "", id="no segment"),
    ],
)
def test_trajectory_version(segments: list[tuple[int, list[str]]], version: str) -> None:
    assert trajectory_version(segments) == version


def test_a_chain_of_turns_is_one_sequence() -> None:
    s = Session()
    (row,) = rows_of(
        s.segment(0, [1, 2], [3], version="a"), s.segment(1, [4], [5, 6], version="b", parent=0), s.end(2)
    )
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert row.logprobs.tolist() == [0, 0, -1.5, 0, -2.5, -3.0]
    assert row.version_code.tolist() == [-1, -1, 0, -1, 1, 1]
    assert (row.versions, row.is_anchor, row.segment_indices) == (("a", "b"), True, (0, 1))


def test_spans_of_a_resumed_generation_give_their_tokens_their_versions() -> None:
    s = Session()
    spans = (VersionSpan("a", 0, 2), VersionSpan("unknown", 2, 3), VersionSpan("b", 3, 4))
    (row,) = rows_of(s.segment(0, [9], [1, 2, 3, 4], spans=spans), s.end(1))
    assert row.version_code.tolist() == [-1, 0, 0, -1, 1]


def test_a_branch_inherits_tokens_and_trains_its_own_alone() -> None:
    s = Session()
    first, second = rows_of(
        s.segment(0, [1], [2, 3], version="a"),
        s.segment(1, [4], [5], version="b", parent=0),
        s.segment(2, [6], [7], version="c", parent=0, branch=2, lineage="branch"),
        s.end(3),
    )
    assert (first.tokens.tolist(), first.loss_mask.tolist()) == ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
    assert (second.tokens.tolist(), second.loss_mask.tolist()) == ([1, 2, 6, 7], [0, 0, 0, 1])
    assert (second.version_code.tolist(), second.versions) == ([-1, 0, -1, 1], ("a", "c"))
    assert (first.is_anchor, second.is_anchor) == (False, True)


def test_a_version_that_was_cut_off_is_not_listed() -> None:
    s = Session()
    _, branch = rows_of(
        s.segment(0, [1], [2], version="a"),
        s.segment(1, [3], [4], version="b", parent=0, branch=1, lineage="branch"),
        s.end(2),
    )
    assert (branch.tokens.tolist(), branch.versions, branch.version_code.tolist()) == (
        [1, 3, 4],
        ("b",),
        [-1, -1, 0],
    )


def test_a_sub_agent_of_its_own_context_is_a_sequence_and_the_anchor_is_the_last_in_time() -> None:
    s = Session()
    main, sub = rows_of(
        s.segment(0, [1], [2]),
        s.segment(1, [8], [9], lineage="sub"),
        s.segment(2, [3], [4], parent=0),
        s.end(3),
    )
    assert (main.tokens.tolist(), main.is_anchor) == ([1, 2, 3, 4], True)
    assert (sub.tokens.tolist(), sub.is_anchor) == ([8, 9], False)


def test_a_lineage_without_output_gives_no_sequence_and_no_anchor() -> None:
    s = Session()
    (row,) = rows_of(s.segment(0, [1], [2]), s.segment(1, [5], [], lineage="empty"), s.end(2))
    assert (row.tokens.tolist(), row.is_anchor) == ([1, 2], True)


def test_a_turn_asked_again_after_it_had_ended_was_never_received() -> None:
    s = Session()
    first = s.segment(0, [1], [2], digest="same", version="a", received=10, done=20)
    again = s.segment(1, [1], [3], digest="same", version="b", received=20, done=30, lineage="again")
    asked_meanwhile = s.segment(1, [1], [3], digest="same", received=19, done=30, lineage="again")
    other_question = s.segment(1, [1], [3], digest="other", received=20, done=30, lineage="again")
    assert abandoned([first, again]) == {0}
    assert abandoned([again, first]) == {0}
    assert abandoned([first, asked_meanwhile]) == set()
    assert abandoned([first, other_question]) == set()


def test_an_abandoned_turn_trains_nothing_and_has_no_version() -> None:
    s = Session()
    done = completed(
        feed(
            fresh(1),
            [
                s.segment(0, [1], [2], version="a"),
                s.segment(1, [3], [4], version="lost", parent=0, digest="same", received=10, done=20),
                s.segment(2, [3], [5], version="b", parent=0, digest="same", received=30, lineage="again"),
                s.end(3),
            ],
        )
    )
    first, again = done.sequences
    assert (first.tokens.tolist(), first.loss_mask.tolist()) == ([1, 2], [0, 1])
    assert (again.tokens.tolist(), again.loss_mask.tolist(), again.is_anchor) == (
        [1, 2, 3, 5],
        [0, 0, 0, 1],
        True,
    )
    facts = done.trajectories[0]
    assert (facts.versions, facts.version, facts.abandoned_segments, facts.output_tokens) == (
        ("a", "b"),
        "b",
        1,
        2,
    )
    assert facts.tokens_digest == hashlib.sha256(pack_ids([2]) + pack_ids([5])).hexdigest()


def test_an_abandoned_turn_that_others_build_on_stays_in_their_context_with_mask_0() -> None:
    s = Session()
    rows = rows_of(
        s.segment(0, [1], [2], digest="same", received=10, done=20),
        s.segment(1, [1], [3], digest="same", received=30, lineage="again"),
        s.segment(2, [4], [5], parent=0),
        s.end(3),
    )
    assert [(r.tokens.tolist(), r.loss_mask.tolist()) for r in rows] == [
        ([1, 2, 4, 5], [0, 0, 0, 1]),
        ([1, 3], [0, 1]),
    ]
