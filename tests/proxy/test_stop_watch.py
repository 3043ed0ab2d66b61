"""Stop strings over the seam of two engine calls: the same end as in one call, whatever the cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.stop_watch import Found, StopWatch


def by_byte(ids: Sequence[int]) -> str:
    """One token is one byte, so that characters are cut."""
    return bytes(ids).decode(errors="replace")


def tokens(text: str) -> list[int]:
    return list(text.encode())


def end_in_one_call(output: list[int], stops: list[str]) -> Found | None:
    for count in range(1, len(output) + 1):
        for stop in stops:
            if stop in by_byte(output[:count]):
                return Found(stop, count)
    return None


def end_over_the_seam(output: list[int], stops: list[str], cut: int, step: int) -> Found | None:
    watch = StopWatch(by_byte, stops, output[:cut])
    for count in range(cut + 1, len(output) + step, step):
        found = watch.look(output[:count])
        if found is not None:
            return found
        if watch.over:
            break
    return None


@pytest.mark.parametrize(
    ("before", "after", "stops", "found"),
    [
        ("ab##", "#END", ["###"], ("###", 5)),
        ("thought </too", "l_call> more", ["</tool_call>"], ("</tool_call>", 20)),
        ("a", "bc", ["abc", "ab"], ("ab", 2)),
        ("x", "y", ["xz"], None),
        ("###", "x", ["x"], ("x", 4)),  # the engine finds it as well, at the same token
        ("", "###", ["###"], None),  # nothing is before it: the engine's alone
    ],
)
def test_it_ends_where_one_call_would_have(
    before: str, after: str, stops: list[str], found: tuple[str, int] | None
) -> None:
    watch = StopWatch(by_byte, stops, tokens(before))
    assert watch.look(tokens(before + after)) == found


@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("stop", ["é€", "€", "a😀", "日本"])
def test_characters_that_are_cut_count_when_they_are_whole(stop: str, cut: int) -> None:
    output = tokens("_" + stop + "tail")
    cut = min(cut, len(tokens("_" + stop)) - 1)
    assert end_over_the_seam(output, [stop], cut, 1) == Found(stop, len(tokens("_" + stop)))


def test_a_long_string_of_one_byte_tokens_is_seen_whole() -> None:
    stop = "😀" * 20
    output = tokens("say " + stop)
    assert end_over_the_seam(output, [stop], len(output) - 1, 1) == Found(stop, len(output))


def test_it_looks_no_further_than_a_string_can_reach() -> None:
    looks = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal looks
        looks += 1
        return by_byte(ids)

    watch = StopWatch(counted, ["abc"], tokens("ab"))
    assert watch.look(tokens("ab" + "x" * 1000)) is None
    assert watch.over
    assert looks < 10


def test_special_tokens_without_text_in_between_do_not_end_the_watch() -> None:
    def skipping(ids: Sequence[int]) -> str:
        return by_byte([i for i in ids if i != 0])

    watch = StopWatch(skipping, ["ab"], [*tokens("a"), 0, 0])
    assert watch.look([*tokens("a"), *[0] * 10, *tokens("b")]) == Found("ab", 12)


@given(
    st.text("ab#é😀", min_size=1, max_size=12),
    st.lists(st.text("ab#é😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_over_any_seam_the_end_is_that_of_one_call_if_it_began_before(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    output = tokens(text)
    whole = end_in_one_call(output, stops)
    longest = len(output) if whole is None else whole.tokens - 1  # a cut behind the end does not happen
    if longest < 1:
        return
    cut = data.draw(st.integers(1, longest))
    split = end_over_the_seam(output, stops, cut, data.draw(st.integers(1, 3)))
    if split is not None:
        assert split == whole
    elif whole is not None:  # then it lies wholly in the new call: the engine's business
        assert whole.stop in by_byte(output[cut : whole.tokens])
