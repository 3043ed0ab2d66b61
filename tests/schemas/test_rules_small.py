"""Rule 6 (loss mask), rule 9 (finish reasons), token columns, ids, topics and keys, the error tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import errors, ids, tokens
from schemas import events as ev
from schemas.errors import CorruptPayload, HoofprintError
from schemas.finish import decide
from schemas.loss_mask import mask_nonlast_version_tokens
from schemas.topics import ALL_TOPICS, CONTROL, TOPIC_OF, key_of


@pytest.mark.parametrize(
    ("mask", "versions", "result"),
    [
        ([0, 1, 1], "-ab", [0, 0, 1]),
        ([1, 1, 1], "aba", [1, 0, 1]),
        ([1, 1, 1], "a-a", [1, 1, 1]),
        ([1, 1, 1], "a-b", [0, 0, 1]),
        ([1, 1, 1], "---", [1, 1, 1]),
        ([1, 1, 0], "abc", [0, 1, 0]),
        ([1, 0, 1], "aba", [1, 0, 1]),
        ([1, 1, 1], "ab-", [0, 1, 0]),
        ([0, 0], "ab", [0, 0]),
        ([], "", []),
    ],
)
def test_mask_of_mixed_versions(mask: list[int], versions: str, result: list[int]) -> None:
    codes = np.array([-1 if v == "-" else ord(v) for v in versions], dtype=np.int32)
    given_mask = np.array(mask, dtype=np.uint8)
    masked = mask_nonlast_version_tokens(given_mask, codes)
    assert masked.tolist() == result
    assert masked.dtype == np.uint8
    assert given_mask.tolist() == mask


@pytest.mark.parametrize(
    ("finish", "left", "decision"),
    [
        ("stop", 10, "complete"),  # F21: ended by itself although an abort was in flight
        ("length", 0, "complete"),
        ("tool_calls", 3, "complete"),
        ("stop", 0, "complete"),
        ("abort", 5, "resume"),
        ("abort", 0, "length"),  # F22: the budget is used up exactly at the preemption
        ("abort", -1, "length"),
    ],
)
def test_decision_by_finish_reason(finish: str, left: int, decision: str) -> None:
    assert decide(finish, left) == decision


def test_token_columns_are_little_endian() -> None:
    assert tokens.pack_ids([1, 258, -1]) == bytes.fromhex("010000000201" + "0000" + "ffffffff")
    assert tokens.pack_logprobs([-0.5]) == bytes.fromhex("000000bf")
    for view in (tokens.ids_of, tokens.logprobs_of):
        with pytest.raises(CorruptPayload):
            view(b"12345")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_come_back(values: list[int]) -> None:
    assert tokens.ids_of(tokens.pack_ids(values)).tolist() == values


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_token_id_that_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        tokens.pack_ids([value])


def test_ids_depend_on_every_part_its_type_and_its_place() -> None:
    parts: list[tuple[str | int | None, ...]] = [
        (),
        ("a",),
        ("a", "b"),
        ("ab",),
        ("b", "a"),
        (1,),
        ("1",),
        (None,),
        ("n",),
        ("a", ""),
        ("i1",),
    ]
    assert len({ids.stable_id(*part) for part in parts}) == len(parts)
    assert ids.stable_id("a", 1, None) == "48ffd9698d0012d481c168a3d6303b28"


def test_readable_ids() -> None:
    assert ids.group_id("run", 2, 31) == "run-e2-p000031"
    assert ids.batch_id("run", 3) != ids.batch_id("run", 3, "b1")
    assert ids.topic_name("", "control.v1") == "control.v1"
    assert ids.topic_name("x", "control.v1") == "x.control.v1"


def test_every_event_stands_in_exactly_one_topic() -> None:
    placed = [event for topic in ALL_TOPICS for event in topic.events]
    assert sorted(event.__name__ for event in placed) == sorted(event.__name__ for event in ev.EVENT_TYPES)
    assert TOPIC_OF[ev.GroupCompleted] is CONTROL
    assert CONTROL.partitions == 1


def segment_claim(group_id: str | None) -> ev.SessionClaimed:
    return ev.SessionClaimed(
        run_id="r",
        occurred_at=1,
        session_id="s",
        epoch=1,
        parent_traj_id="t",
        group_id=group_id,
        claimant="c",
    )


def test_the_group_keeps_its_trajectories_in_one_partition_and_free_sessions_go_by_their_own_id() -> None:
    assert key_of(segment_claim("g")) == b"g"
    assert key_of(segment_claim(None)) == b"s"
    assert key_of(ev.RunEnded(run_id="r", occurred_at=1, reason="")) == b"r"
    completed = ev.GroupFailed(run_id="r", occurred_at=1, group_id="g", attempt=0, reason="timeout")
    assert key_of(completed) == b"r"
    letter = ev.DeadLetter(
        run_id="r", occurred_at=1, topic="t", partition=2, offset=3, key=None, reason="", raw=b""
    )
    assert key_of(letter) == b"t/2"


def _all_errors(root: type[HoofprintError]) -> list[type[HoofprintError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_errors(child))]


def test_the_drawn_error_tree_is_the_tree() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        head = line.lstrip("│├└─ ")
        if head and (line[0] in "│├└ " or head == "HoofprintError"):
            drawn.append(((len(line) - len(head)) // 4, head.split()[0].split("(")[0]))
    parents: dict[str, str] = {}
    path: list[str] = []
    for depth, name in drawn:
        path = [*path[:depth], name]
        parents[name] = path[-2] if depth else ""
    real = {
        e.__name__: e.__bases__[0].__name__
        for e in _all_errors(HoofprintError)
        if e.__module__ == errors.__name__
    }
    assert parents == {**real, "HoofprintError": ""}


def test_codes_are_unique_and_snake_case() -> None:
    codes = [e.code for e in _all_errors(HoofprintError) if e.__module__ == errors.__name__]
    assert len(codes) == len(set(codes))
    assert all(code == code.lower() and code.replace("_", "").isalpha() for code in codes)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.BadRequest("x"), 400), (errors.Unauthorized("x"), 401), (errors.UnknownSession("x"), 404),
        (errors.StalenessExceeded("x"), 502), (errors.TrajectoryVersionChanged("x"), 502), (errors.GenerationPreempted("x"), 502),
        (errors.ContextOverflow("x"), 413), (errors.SessionConflict("x"), 409), (errors.TrajectoryClosed("x"), 409),
        (errors.TrajectoryGone("x"), 410), (errors.Overloaded("x"), 429), (errors.Overloaded("x", http_status=503), 503),
        (errors.EngineUnavailable("x"), 503), (errors.EngineTimeout("x"), 504),
        (errors.EngineRejected("x", http_status=422), 422),
        (errors.PublishFailed("x"), 503), (errors.PublishTimeout("x"), 503), (errors.StoreError("x"), 503),
    ],
)  # fmt: skip
def test_http_status_of_each_error(error: HoofprintError, status: int) -> None:
    assert error.http_status == status


def test_an_error_carries_its_data() -> None:
    error = errors.Overloaded("full", retry_after_s=2.0, inflight=9)
    assert error.detail == {"retry_after_s": 2.0, "inflight": 9}
    assert str(error) == "full"
