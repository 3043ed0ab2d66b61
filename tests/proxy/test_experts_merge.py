"""Routed experts over preemptions and turns: the rows of the rules, whatever the cuts."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.experts import ExpertCall, absent, merge, narrowed, pack_experts, unpack_experts
from schemas.errors import CorruptPayload


def encoded(rows: object) -> str:
    return base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode()


def call(prefix: int, output: int, rows: object, start: int = 0) -> ExpertCall:
    return ExpertCall(prefix, output, start, None if rows is None else encoded(rows))


A = call(3, 2, [10, 11, 12, 13])
B = call(5, 2, [20, 21, 22, 23, 24, 25])


@pytest.mark.parametrize(
    ("calls", "kept", "rows"),
    [
        ([A, B], 0, [10, 11, 12, 13, 24, 25]),
        ([A, B], 4, [13, 24, 25]),  # an append that starts at row 3
        ([A], 0, [10, 11, 12, 13]),
        ([call(3, 0, None), A, B], 0, [10, 11, 12, 13, 24, 25]),  # cut before a token came
        ([call(3, 0, [99, 99]), A], 0, [10, 11, 12, 13]),
        ([A, call(5, 2, [24, 25], start=4)], 0, [10, 11, 12, 13, 24, 25]),  # only what is asked for
        ([call(3, 2, None), B], 0, [255, 255, 255, 255, 24, 25]),  # an engine that died
        ([A, call(5, 2, None)], 1, [10, 11, 12, 13, 255, 255]),
        ([call(3, 2, [0, 1, 255, 0])], 0, [0, 1, 255, 0]),
    ],
)
def test_rows_of_a_turn(calls: list[ExpertCall], kept: int, rows: list[int]) -> None:
    merged = merge(calls, kept)
    assert merged is not None
    assert merged[:, 0].tolist() == rows
    assert merged.dtype == (np.uint16 if 255 in rows and calls[0].data and len(calls) == 1 else np.uint8)


def test_no_rows_are_no_payload() -> None:
    assert merge([call(3, 2, None)], 0) is None
    assert merge([], 0) is None
    assert merge([call(3, 0, [1, 2])], 0) is None


@pytest.mark.parametrize("number", [-1, 65535, 65536])
def test_numbers_that_do_not_fit_are_errors(number: int) -> None:
    with pytest.raises(CorruptPayload):
        merge([call(2, 1, [0, number])], 0)


@pytest.mark.parametrize(
    ("number", "dtype"), [(-1, np.uint8), (256, np.uint8), (-1, np.uint16), (65536, np.uint16)]
)
def test_narrowing_never_wraps(number: int, dtype: type[np.uint8 | np.uint16]) -> None:
    with pytest.raises(CorruptPayload):
        narrowed(np.array([[number]], np.int32), dtype)


@pytest.mark.parametrize(
    "calls",
    [
        [call(3, 2, [10, 11, 12])],  # a row is missing
        [A, call(5, 2, [[1, 2]] * 6)],  # of another width
        [ExpertCall(3, 2, 0, "no base64!")],
        [ExpertCall(3, 2, 0, "AAAA")],
        [call(3, 2, [13], start=3), B],  # rows that were never asked for
        [call(3, 2, [])],
    ],
)
def test_rows_that_do_not_fit_the_tokens_are_errors(calls: list[ExpertCall]) -> None:
    with pytest.raises(CorruptPayload):
        merge(calls, 0)


@given(st.data())
def test_any_cuts_of_a_generation_give_the_same_rows(data: st.DataObject) -> None:
    prompt, output = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 12))
    kept = data.draw(st.integers(0, prompt))
    width, most = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([3, 254, 255, 60000]))
    seed = data.draw(st.integers(0, 99))
    whole = np.random.default_rng(seed).integers(0, most + 1, (prompt + output - 1, width))
    cuts = sorted(data.draw(st.lists(st.integers(0, output), max_size=4)))
    calls = []
    for low, high in zip([0, *cuts], [*cuts, output], strict=True):
        prefix = prompt + low
        rows = np.array(whole[: max(prefix + high - low - 1, 0)])
        rows[: max(0, prefix - 1) if low else 0] = 1  # new weights route what was before in another way
        start = data.draw(st.sampled_from([0, max(0, (kept if low == 0 else prefix) - 1)]))
        calls.append(call(prefix, high - low, rows[start:], start))
    merged = merge(calls, kept)
    assert merged is not None
    np.testing.assert_array_equal(merged, whole[max(0, kept - 1) :])
    np.testing.assert_array_equal(unpack_experts(pack_experts(merged)), merged)
    assert not absent(merged).any()


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4))
def test_segments_of_a_lineage_are_its_rows(first: int, turns: list[tuple[int, int]]) -> None:
    total = sum(context + output for context, output in turns)
    whole = np.arange(total - 1)[:, None]
    at, parts = 0, []
    for context, output in turns:
        prefix = at + context
        merged = merge([call(prefix, output, whole[: prefix + output - 1])], at)
        assert merged is not None
        parts.append(merged)
        at = prefix + output
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_bytes_that_are_no_rows_are_refused() -> None:
    with pytest.raises(CorruptPayload):
        unpack_experts(b"x")
    with pytest.raises(CorruptPayload):
        unpack_experts(pack_experts(np.zeros((2, 2), np.float32)))
