"""A dead letter fits into a record, whatever record it is made of."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import decode, encode
from schemas.letters import letter_of, was_cut

RECORD = 1_000_000
"""What a client or a broker takes at most, unless it is told otherwise."""
SIZES = st.sampled_from([0, 1, 5_000, 449_999, 450_000, 899_999, 900_000, 900_001, 999_000])


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_a_letter_fits_and_says_whether_it_is_whole(
    key: int, value: int, header: int, reason: int, named_twice: bool
) -> None:
    headers = [("h", b"h" * header), *([("h", None)] if named_twice else [])]
    letter = letter_of("r", "t", 0, 1, 2, "?" * reason, b"k" * key, b"v" * value, headers)
    assert len(encode(letter)) < RECORD
    assert decode(encode(letter)) == letter
    whole = (
        letter.key == b"k" * key
        and letter.raw == b"v" * value
        and letter.headers == {name: held or b"" for name, held in headers}
    )
    assert was_cut(letter) is not whole


def test_a_record_without_key_value_or_a_headers_value_has_a_letter() -> None:
    letter = letter_of("r", "t", 0, 1, 2, "why", None, None, [("h", None)])
    assert (letter.key, letter.raw, letter.headers, letter.occurred_at) == (None, b"", {"h": b""}, 2000)
    assert decode(encode(letter)) == letter
