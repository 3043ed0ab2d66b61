"""Reasoning and content, whole and in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.reply_sections import SectionStream, split_reply

CASES = [
    ("plain", True, False, ("", "plain")),
    ("<think>a</think>b", False, False, ("", "<think>a</think>b")),
    ("<think>\na\n</think>\n\nb", True, False, ("a", "b")),
    ("a\n</think>\n\nb ", True, True, ("a", "b ")),
    ("<think>a</think>b", True, True, ("a", "b")),
    ("<think>cut off", True, False, ("cut off", "")),
    ("cut off", True, True, ("cut off", "")),
    (" b <think>c</think>", True, False, ("", " b <think>c</think>")),
    ("<think></think>", True, False, ("", "")),
]


@pytest.mark.parametrize(("text", "thinks", "inside", "parts"), CASES)
def test_a_reply_is_split_where_its_template_knows_reasoning(
    text: str, thinks: bool, inside: bool, parts: tuple[str, str]
) -> None:
    assert split_reply(text, thinks=thinks, inside=inside) == parts


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "<th", "</", "a", " ", "\n", "b c"]), max_size=12
)


@given(pieces=PIECES, thinks=st.booleans(), inside=st.booleans(), tools=st.booleans())
def test_the_pieces_of_a_stream_add_up_to_the_parts_of_the_whole(
    pieces: list[str], thinks: bool, inside: bool, tools: bool
) -> None:
    reasoning, content = split_reply("".join(pieces), thinks=thinks, inside=inside)
    stream = SectionStream(thinks=thinks, inside=inside, marker="<tool_call>" if tools else None)
    told = {"reasoning": "", "content": ""}
    for piece in pieces:
        for part, shown in stream.feed(piece):
            told[part] += shown
    if tools:
        assert "<tool_call>" not in told["content"]
    for part, shown in stream.finish(reasoning, content):
        told[part] += shown
    assert told == {"reasoning": reasoning, "content": content}
