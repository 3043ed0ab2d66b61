"""The pure parts of the proxy: routing, the engine's stream, the fold of a session's log, text, tokens, tool calls."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.detokenize import TextStream
from proxy.engine_stream import ChunkReader
from proxy.gate import Gate
from proxy.log_fold import read_log, restore
from proxy.output import Output
from proxy.routing import Lineage, Step, chain_of, normalised, place_messages, place_tokens
from proxy.sessions import Identity, Session, end_error
from proxy.tito import changed_tokens
from proxy.tokens_auth import SessionToken, TokenSigner
from proxy.tool_calls import parse_tool_calls
from schemas.errors import EngineRejected, Unauthorized
from schemas.events import EndFacts, Event, SessionClaimed, TokenSegment, TrajectoryEnded, identified
from schemas.tokens import ids_of, pack_ids, pack_logprobs
from schemas.versions import VersionSpan

# -- routing ------------------------------------------------------------------------------------------


def lineage(number: int, tokens: list[int], *ends: int) -> Lineage:
    steps = [Step(10 * number + i, number, end) for i, end in enumerate(ends)]
    return Lineage(f"l{number}", bytearray(pack_ids(tokens)), steps)


@pytest.mark.parametrize(
    ("prompt", "parent", "prefix", "reason"),
    [
        ([1, 2, 3, 4, 5, 6], 1, 4, None),  # append to the tail
        ([1, 2, 3, 4], 1, 4, None),  # nothing new is an append, too
        ([1, 2, 3, 9], 0, 2, None),  # an older step: branch
        ([1, 2, 8, 8, 8], 10, 4, None),  # the longer one, in another lineage
        ([1, 9], None, 0, "history_rewrite"),
    ],
)
def test_tokens_go_to_the_longest_step_that_is_their_prefix(
    prompt: list[int], parent: int | None, prefix: int, reason: str | None
) -> None:
    lineages = [lineage(0, [1, 2, 3, 4], 2, 4), lineage(1, [1, 2, 8, 8], 4)]
    place = place_tokens(lineages, pack_ids(prompt))
    assert (place.parent.segment_index if place.parent else None, place.prefix, place.reason) == (
        parent,
        prefix,
        reason,
    )


def test_the_first_request_of_a_session_is_no_rewrite() -> None:
    assert place_tokens([], pack_ids([1])).reason == "first"


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_a_place_is_a_true_prefix_and_no_step_is_longer(tracks: list[list[int]], prompt: list[int]) -> None:
    lineages = [lineage(i, track, *range(1, len(track) + 1)) for i, track in enumerate(tracks)]
    place = place_tokens(lineages, pack_ids(prompt))
    matching = [
        n
        for track in tracks
        for n in range(1, len(track) + 1)
        if track[:n] == prompt[:n] and n <= len(prompt)
    ]
    assert place.prefix == max(matching, default=0)


def test_histories_are_compared_as_agents_send_them_back() -> None:
    sent = {
        "role": "assistant", "content": None, "reasoning_content": " ",
        "tool_calls": [{"id": "call_1-a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}],
    }  # fmt: skip
    back = {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "call1a", "type": "function", "function": {"name": "f", "arguments": {"a": 2, "b": 1}}}],
    }  # fmt: skip
    assert chain_of([], [sent]) == chain_of([], [back])
    assert normalised({"role": "user", "content": [{"type": "text", "text": "x"}]}) == {
        "role": "user",
        "content": "x",
    }
    assert chain_of([], [sent]) != chain_of([{"type": "function"}], [sent])


def test_a_conversation_needs_something_new_to_append() -> None:
    user, reply = {"role": "user", "content": "u"}, {"role": "assistant", "content": "r"}
    chain = chain_of([], [user, reply])
    step = Step(0, 0, 5, chain[-1], 2)
    steps, tools = {chain[-1]: step}, {chain[0]}
    assert place_messages(steps, chain_of([], [user, reply, user]), tools).parent is step
    assert place_messages(steps, chain, tools).reason == "history_rewrite"
    assert place_messages(steps, chain_of([{}], [user, reply, user]), tools).reason == "tools_changed"
    assert place_messages({}, chain, set()).reason == "first"


# -- the engine's stream --------------------------------------------------------------------------------


def frame(ids: list[int], total: int, finish: str | None = None, version: str = "v", **meta: Any) -> bytes:
    info = {
        "completion_tokens": total,
        "finish_reason": {"type": finish} if finish else None,
        "weight_version": version,
        "output_token_logprobs": [[-float(i), i, None] for i in ids],
        **meta,
    }
    return b"data: " + orjson.dumps({"output_ids": ids, "text": "", "meta_info": info}) + b"\n\n"


def stream_of(tokens: list[int], cuts: list[int], *, incremental: bool) -> bytes:
    ends = sorted({*cuts, len(tokens)})
    starts = [0, *ends[:-1]]
    frames = []
    for start, end in zip(starts, ends, strict=True):
        finish = "length" if end == len(tokens) else None
        frames.append(frame(tokens[start if incremental else 0 : end], end, finish))
    return b"".join(frames) + b"data: [DONE]\n\n"


@given(
    tokens=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 20), max_size=8),
    incremental=st.booleans(),
    known=st.booleans(),
    looks=st.booleans(),
    chunk=st.integers(1, 400),
)
def test_every_token_is_taken_once_in_both_modes_however_the_bytes_arrive(
    tokens: list[int], cuts: list[int], incremental: bool, known: bool, looks: bool, chunk: int
) -> None:
    raw = stream_of(tokens, [c for c in cuts if c < len(tokens)], incremental=incremental)
    mode: Any = ("incremental" if incremental else "cumulative") if known else None
    reader = ChunkReader(mode)
    for at in range(0, len(raw), chunk):
        reader.feed(raw[at : at + chunk])
        if looks:
            reader.settle()
            assert reader.output.ids == tokens[: reader.count]
    assert reader.output.ids == tokens
    assert reader.output.logprobs == [-float(t) for t in tokens]
    assert reader.output.spans == [VersionSpan("v", 0, len(tokens))]


def test_an_abort_in_the_waiting_queue_does_not_repeat_the_last_token() -> None:
    reader = ChunkReader(None)
    reader.feed(frame([5], 1) + frame([6], 2) + frame([6], 2, "abort"))
    assert (reader.output.ids, reader.mode) == ([5, 6], "incremental")


def test_a_call_that_broke_off_keeps_tokens_and_versions_as_they_came() -> None:
    reader = ChunkReader("cumulative")
    reader.feed(frame([1, 2], 2, version="a"))
    reader.settle()
    reader.feed(frame([1, 2, 3], 3, version="b") + b"data: {half")
    reader.settle()
    assert reader.output.ids == [1, 2, 3]
    assert reader.output.spans == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]


def test_tokens_among_which_the_weights_changed_have_no_version() -> None:
    reader = ChunkReader("cumulative", label="a")
    reader.feed(frame([1, 2], 2, version="a"))
    reader.settle()
    reader.feed(frame([1, 2, 3, 4], 4, version="b"))
    reader.settle()
    reader.feed(frame([1, 2, 3, 4, 5, 6], 6, version="b"))
    reader.settle()
    assert reader.output.spans == [
        VersionSpan("a", 0, 2), VersionSpan("unknown", 2, 4), VersionSpan("b", 4, 6),
    ]  # fmt: skip


def test_the_end_of_a_call_tells_the_versions_of_its_own_tokens_alone() -> None:
    output = Output()
    output.extend([1, 2], [-1.0, -2.0], "a")
    reader = ChunkReader("cumulative", output, "b")
    listed = [{"version": "b", "start": 0, "end": 1}, {"version": "c", "start": 1, "end": 3}]
    reader.feed(frame([3, 4], 2, version="c"))
    reader.settle()
    reader.feed(frame([3, 4, 5], 3, "stop", version="c", weight_versions=listed) + b"data: [DONE]\n\n")
    assert output.ids == [1, 2, 3, 4, 5]
    assert output.spans == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3), VersionSpan("c", 3, 5)]
    assert reader.changes == 1


def test_an_error_in_the_stream_is_the_engine_s_refusal() -> None:
    reader = ChunkReader("cumulative")
    error = {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}
    with pytest.raises(EngineRejected) as refused:
        reader.feed(b"data: " + orjson.dumps(error) + b"\n\n")
    assert refused.value.http_status == 400


# -- a session from the log ----------------------------------------------------------------------------

IDS: dict[str, Any] = {"run_id": "r", "occurred_at": 1, "session_id": "s", "parent_traj_id": "t"}


def claim(epoch: int, *, restart: bool = False) -> Event:
    return identified(SessionClaimed(**IDS, epoch=epoch, claimant="c", restart=restart))


def segment(
    epoch: int, index: int, context: list[int], output: list[int], parent: int | None = None, **more: Any
) -> TokenSegment:
    return identified(
        TokenSegment(
            **IDS, epoch=epoch, segment_index=index, lineage_id=more.pop("lineage_id", "l0"), parent_segment_index=parent,
            api="generate", context_ids=pack_ids(context), output_ids=pack_ids(output),
            output_logprobs=pack_logprobs([0.0] * len(output)), spans=(VersionSpan(f"v{epoch}", 0, len(output)),),
            version_at_dispatch="v", engine_id="e", finish_reason="stop", request_digest="d", sampling="{}",
            prompt_tokens=1, received_at=1, first_token_at=1, done_at=1, **more,
        )
    )  # fmt: skip


def ended(epoch: int) -> Event:
    return identified(
        TrajectoryEnded(**IDS, epoch=epoch, end=EndFacts(segment_count=1, status="failed", reason="expired"))
    )


def test_events_of_an_older_epoch_are_void_after_the_claim_ends_included() -> None:
    log = read_log(
        [
            claim(1),
            segment(1, 0, [1], [2]),
            claim(5),
            segment(1, 1, [3], [4], 0),
            ended(1),
            segment(5, 1, [5], [6], 0),
        ]
    )
    assert [ids_of(s.output_ids).tolist() for s in log.segments.values()] == [[2], [6]]
    assert (log.end, log.epoch) == (None, 5)


def test_a_lower_claim_has_no_say_and_a_restart_voids_the_past() -> None:
    log = read_log([claim(5), segment(5, 0, [1], [2]), claim(3, restart=True), segment(5, 1, [3], [4], 0)])
    assert sorted(log.segments) == [0, 1]
    log = read_log([claim(5), segment(5, 0, [1], [2]), ended(5), claim(6, restart=True)])
    assert (log.segments, log.end) == ({}, None)


@given(st.lists(st.integers(0, 4), max_size=10))
def test_repetition_changes_nothing(repeats: list[int]) -> None:
    events: list[Event] = [
        claim(1),
        segment(1, 0, [1], [2]),
        segment(1, 1, [3], [4], 0),
        segment(1, 2, [5], [6], 1),
        ended(1),
    ]
    again = [events[r] for r in sorted(repeats)]
    once, twice = read_log(events), read_log([*events, *again])
    assert (once.segments, once.end) == (twice.segments, twice.end)


def test_a_restored_session_has_its_lineages_versions_and_next_index() -> None:
    log = read_log(
        [
            claim(1),
            segment(1, 0, [1], [2]),
            segment(1, 1, [3], [4], 0),
            segment(1, 2, [9], [8], 0, branch_point=2, lineage_id="l1"),
        ]
    )
    session = Session(Identity("s", "t", "free"), 2, "", 0)
    restore(session, log)
    assert [ids_of(bytes(each.tokens)).tolist() for each in session.lineages] == [[1, 2, 3, 4], [1, 2, 9, 8]]
    assert (session.next_index, session.versions, session.started) == (3, ["v1"], True)
    place = place_tokens(session.lineages, pack_ids([1, 2, 9, 8, 7]))
    assert place.parent is not None
    assert (place.parent.segment_index, session.appends(place)) == (2, True)


# -- text ------------------------------------------------------------------------------------------------


def bytes_decode(ids: Any) -> str:
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=40), st.integers(1, 5))
def test_streamed_text_is_the_final_text_and_never_broken(text: str, step: int) -> None:
    ids = list(text.encode())
    stream = TextStream(bytes_decode, [], None)
    shown = "".join(stream.take(ids[:end]) for end in range(step, len(ids), step))
    assert text.startswith(shown)
    assert shown + stream.finish(text) == text


def test_stop_strings_and_tool_calls_are_held_back() -> None:
    stream = TextStream(bytes_decode, ["STOP"], "<tool_call>")
    text = "say S ST STO <tool STOP"
    shown = "".join(stream.take(list(text.encode()[:end])) for end in range(1, len(text) + 1))
    assert shown == "say S ST STO <tool "
    assert stream.finish("say S ST STO <tool ") == ""


def test_tool_calls() -> None:
    text = 'Go.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    content, calls = parse_tool_calls(text, "salt")
    assert content == "Go."
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("f", '{"x":1}'),
        ("g", "{}"),
    ]
    assert calls[0]["id"] != calls[1]["id"]
    assert calls == parse_tool_calls(text, "salt")[1]
    assert parse_tool_calls("<tool_call>no json</tool_call>", "s") == ("<tool_call>no json</tool_call>", [])


def test_changed_tokens_counts_what_differs_between_common_ends() -> None:
    assert changed_tokens([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert changed_tokens([1, 2, 3, 4], [1, 9, 4]) == 2
    assert changed_tokens([1, 1], [1, 1, 1]) == 1


# -- tokens of sessions, gate ---------------------------------------------------------------------------


def test_a_session_token_is_valid_in_its_run_only_and_unchanged_only() -> None:
    token = SessionToken("s", "t", "train", "g", 0, 1, None, 2, 77, 5)
    text = TokenSigner(b"key", "run").issue(token)
    assert TokenSigner(b"key", "run").read(text) == token
    assert not set(text) & set("/?#%&+= ")
    for signer, given_text in (
        (TokenSigner(b"key", "other"), text),
        (TokenSigner(b"other", "run"), text),
        (TokenSigner(b"key", "run"), "A" + text[1:]),
        (TokenSigner(b"key", "run"), text.partition(".")[0]),
        (TokenSigner(b"key", "run"), ""),
    ):
        with pytest.raises(Unauthorized):
            signer.read(given_text)


async def test_the_gate_opens_when_no_reason_is_left_and_holds_single_sessions() -> None:
    gate = Gate()
    gate.close("a")
    gate.close("b")
    gate.close_session("s1")
    first, second = asyncio.ensure_future(gate.enter("s1")), asyncio.ensure_future(gate.enter("s2"))
    await asyncio.sleep(0)
    gate.open("a")
    await asyncio.sleep(0)
    assert (gate.waiting, first.done(), second.done()) == (2, False, False)
    gate.open("b")
    await asyncio.wait([second], timeout=5)
    assert (gate.waiting, first.done(), second.done()) == (1, False, True)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert gate.waiting == 0


def test_errors_keep_their_detail_over_the_log() -> None:
    end = EndFacts(
        segment_count=0,
        status="failed",
        reason="partial_rollout_staleness_exceeded",
        detail='{"message":"m","versions":["a","b"]}',
    )
    error = end_error(
        Identity("s", "t", "free"), msgspec.json.decode(msgspec.json.encode(end), type=EndFacts)
    )
    assert (error.http_status, error.message, error.detail["versions"]) == (502, "m", ["a", "b"])
