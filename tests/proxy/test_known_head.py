"""A body whose head is cut means what the whole body means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_rig import Proxy, running_proxy, settings_for
from scripted_engine import ScriptedEngine, token_at
from update_calls import cut_once

from proxy.known_head import cut_known
from schemas.tokens import ids_of, pack_ids

HEAD = [(7919 * i) % 151_000 for i in range(300)]
TOKENS = st.integers(0, 151_000)
MARK = -(2**53)


def whole(raw: bytes, lineages: list[list[int]]) -> dict[str, Any] | None:
    cut = cut_known(raw, [pack_ids(tokens) for tokens in lineages])
    return (
        None if cut is None else {**cut.body, "input_ids": ids_of(cut.head).tolist() + cut.body["input_ids"]}
    )  # type: ignore[operator]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",", ": "), (", ", ":")])
@given(rest=st.lists(TOKENS, max_size=5), other=st.lists(TOKENS, max_size=5), extra=st.booleans())
def test_head_and_rest_are_the_ids_of_the_body(
    separators: tuple[str, str], rest: list[int], other: list[int], extra: bool
) -> None:
    body = {"note": '"input_ids":[1', "input_ids": HEAD + rest, "sampling_params": {"temperature": 0.5}}
    if extra:
        body = {"input_ids": body["input_ids"], "end": {"input_ids": HEAD}}
    found = whole(json.dumps(body, separators=separators).encode(), [HEAD, HEAD[:260] + other])
    assert found is None or found == body
    if not extra and separators[0] == separators[1].replace(":", ","):
        assert found is not None


@pytest.mark.parametrize(
    "raw",
    [
        b'{"end":{"input_ids":%s},"input_ids":[5]}',  # another field of that name comes first
        b'{"input_ids":%s,"input_ids":[5]}',  # the last one counts
        b'{"end":{"input_ids":%s},"input_ids":[-9007199254740992,5]}',
        b'[{"input_ids":%s}]',
        b'{"input_ids":%s',
    ],
)
def test_a_body_that_only_looks_like_it_is_not_cut(raw: bytes) -> None:
    assert cut_known(raw % json.dumps(HEAD, separators=(",", ":")).encode(), [pack_ids(HEAD)]) is None


def test_a_number_that_only_begins_like_the_last_token_is_not_it() -> None:
    ids = [*HEAD[:-1], HEAD[-1] * 10 + 7, 4]
    assert cut_known(json.dumps({"input_ids": ids}).encode(), [pack_ids(HEAD)]) is None


def test_the_longest_lineage_that_fits_is_cut() -> None:
    longer = [*HEAD, 1, 2]
    cut = cut_known(json.dumps({"input_ids": [*longer, 3]}).encode(), [pack_ids(HEAD), pack_ids(longer)])
    assert cut is not None
    assert (ids_of(cut.head).tolist(), cut.body) == (longer, {"input_ids": [3]})
    assert json.loads(cut.text + b"]") == longer


@pytest.mark.broker
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("more", [[], [9], [9, 8, 7]])
async def test_a_late_turn_reaches_the_engine_number_by_number_also_after_a_cut(
    broker: str, tmp_path: Path, engine: ScriptedEngine, separators: tuple[str, str], more: list[int]
) -> None:
    async with running_proxy(settings_for(broker, tmp_path, [engine.url])) as proxy:
        opened = await proxy.open()
        _, first = await proxy.generate(opened, [5] * 300, 4)
        context = [5] * 300 + first["output_ids"] + more
        body = json.dumps(
            {"input_ids": context, "sampling_params": {"max_new_tokens": 6}}, separators=separators
        )
        engine.held_at = 2
        status, second = await cut_once(proxy, engine, posted(proxy, opened["base_url"] + "/generate", body))
    assert (status, second["output_ids"]) == (200, [token_at(len(context) + i) for i in range(6)])
    assert [sent["input_ids"] for sent in engine.bodies[1:]] == [context, context + second["output_ids"][:2]]


async def posted(proxy: Proxy, url: str, body: str) -> tuple[int, dict[str, Any]]:
    async with proxy.http.post(url, data=body) as reply:
        return reply.status, await reply.json()
