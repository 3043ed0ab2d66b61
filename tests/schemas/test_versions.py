"""Rule 1: real labels, and where the versions of a reply come from."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.versions import (
    VersionSpan,
    append_spans,
    covers,
    distinct_real,
    merge_spans,
    real_version,
    spans_of_reply,
)


@pytest.mark.parametrize(
    ("label", "real"),
    [
        (None, None), ("", None), ("  ", None), ("-1", None), (" -1 ", None), (-1, None), ("unknown", None), ("UNKNOWN", None),
        ("None", None), (" none\n", None),
        ("0", "0"), (0, "0"), ("default", "default"), ("-1.0", "-1.0"), (-1.0, "-1.0"), ("  v7 ", "v7"),
        ("V7", "V7"), ("-2", "-2"),
    ],
)  # fmt: skip
def test_real_version(label: object, real: str | None) -> None:
    assert real_version(label) == real


def test_distinct_real_keeps_the_order_of_first_sight() -> None:
    assert distinct_real(["v2", " v1", "unknown", "v2 ", None, "v3", "v1"]) == ["v2", "v1", "v3"]


def listed(*spans: tuple[object, int, int]) -> dict[str, object]:
    return {
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
        "weight_version": "scalar",
    }


@pytest.mark.parametrize(
    ("meta_info", "spans", "given_up"),
    [
        # F25: per-token spans win over the scalar
        (listed(("v1", 0, 2), ("v2", 2, 5)), [("v1", 0, 2), ("v2", 2, 5)], False),
        (listed((" v1 ", 0, 2), ("v1", 2, 5)), [("v1", 0, 5)], False),
        (listed(("v1", 0, 0), ("v2", 0, 5)), [("v2", 0, 5)], False),
        (listed((None, 0, 2), ("v2", 2, 5)), [("unknown", 0, 2), ("v2", 2, 5)], False),
        # not covering: too short, too long, a hole, overlapping, not from 0, out of order
        (listed(("v1", 0, 2), ("v2", 2, 4)), [("v2", 0, 5)], True),
        (listed(("v1", 0, 2), ("v2", 2, 6)), [("v2", 0, 5)], True),
        (listed(("v1", 0, 2), ("v2", 3, 5)), [("v2", 0, 5)], True),
        (listed(("v1", 0, 3), ("v2", 2, 5)), [("v2", 0, 5)], True),
        (listed(("v1", 1, 5)), [("v1", 0, 5)], True),
        (listed(("v2", 2, 5), ("v1", 0, 2)), [("v1", 0, 5)], True),
        # not a list of spans at all
        ({"weight_versions": [{"version": "v1"}]}, [("v1", 0, 5)], True),
        ({"weight_versions": ["v1"]}, [("unknown", 0, 5)], True),
        ({"weight_versions": [{"version": "v1", "start": "x", "end": None}]}, [("v1", 0, 5)], True),
        ({"weight_versions": "v1", "weight_version": "v3"}, [("v3", 0, 5)], False),
        ({"weight_versions": [], "weight_version": "v3"}, [("v3", 0, 5)], False),
        # scalars, best first; F10: a reply without any
        ({"weight_version": " v3 ", "version": "v4"}, [("v3", 0, 5)], False),
        ({"weight_version": 0, "version": "v4"}, [("0", 0, 5)], False),
        ({"weight_version": None, "version": "v4"}, [("v4", 0, 5)], False),
        ({"version": 7}, [("7", 0, 5)], False),
        ({"weight_version": "-1"}, [("unknown", 0, 5)], False),
        ({}, [("unknown", 0, 5)], False),
    ],
)  # fmt: skip
def test_spans_of_a_reply_of_five_tokens(
    meta_info: dict[str, object], spans: list[tuple[str, int, int]], given_up: bool
) -> None:
    assert spans_of_reply(meta_info, 5) == ([VersionSpan(*span) for span in spans], given_up)


def test_a_reply_without_output_has_no_spans() -> None:
    assert spans_of_reply({"weight_version": "v1"}, 0) == ([], False)


def test_spans_of_a_resumed_chunk_go_behind_what_is_there() -> None:
    there = [VersionSpan("v1", 0, 3)]
    assert append_spans(there, [VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 4)], 3) == [
        VersionSpan("v1", 0, 5),
        VersionSpan("v2", 5, 7),
    ]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=8))
def test_merged_spans_still_partition_the_output(pieces: list[tuple[str, int]]) -> None:
    spans, at = [], 0
    for version, length in pieces:
        spans.append(VersionSpan(version, at, at + length))
        at += length
    merged = merge_spans(spans)
    assert covers(merged, at)
    assert all(a.version != b.version for a, b in pairwise(merged))
    tokens = [version for version, length in pieces for _ in range(length)]
    assert [span.version for span in merged for _ in range(span.stop - span.start)] == tokens
