"""Abort, pause and new weights while requests run, at every engine: nothing is lost, and the spans say which weights it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_client import Client, Running

from proxy.engine_stream import ChunkReader
from proxy.engines import Engine, engine_http
from stack.engine.launch import EngineProcess

Always = Callable[[int], Path]


async def running(certain: Client, *rids: str, tokens: int = 400) -> list[Running]:
    """Requests that have some tokens."""
    made = [certain.begin([1, 2], rid, max_new_tokens=tokens) for rid in rids]
    for request in made:
        await request.until_tokens(3)
    return made


def spans_of(reader: ChunkReader) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.stop) for span in reader.output.spans]


def assert_cut(reader: ChunkReader, version: str) -> None:
    """A partial answer: an abort of a user, every token with its log-prob, all of this version."""
    assert reader.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    count = reader.meta["completion_tokens"]
    assert 3 <= count < 400
    assert reader.output.ids == [7] * count
    assert len(reader.output.logprobs) == count
    assert spans_of(reader) == [(version, 0, count)]


async def test_an_abort_keeps_the_tokens_and_reaches_the_named_request_alone(certain: Client) -> None:
    cut, other = await running(certain, "a" * 32, "b" * 32)
    assert await certain.post("/abort_request", {"rid": "a" * 32}) == (200, "")
    assert_cut(await cut.done(), "v7")
    assert (await other.done()).finish == {"type": "length", "length": 400}


async def test_a_partial_answer_is_gone_on_with_as_a_longer_prompt(certain: Client, always: Always) -> None:
    (cut,) = await running(certain, "resumed")
    await certain.post("/abort_request", {"rid": "resumed"})
    partial = (await cut.done()).output.ids
    await certain.update(always(9), "v9")
    answer = await certain.generate([1, 2, *partial], max_new_tokens=4)
    assert answer["output_ids"] == [9] * 4
    assert answer["meta_info"]["prompt_tokens"] == 2 + len(partial)


async def test_an_abort_of_an_unstreamed_request_answers_200_with_what_there_is(certain: Client) -> None:
    task = asyncio.create_task(certain.generate([1], rid="unstreamed", max_new_tokens=400))
    await certain.until_load(lambda load: load["num_running_reqs"] == 1)
    await certain.post("/abort_request", {"rid": "unstreamed"})
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"]
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


async def test_an_abort_of_nobody_is_200(certain: Client) -> None:
    assert await certain.post("/abort_request", {"rid": "nobody"}) == (200, "")
    assert await certain.post("/abort_request", {}) == (200, "")


async def test_abort_all_cuts_every_request(certain: Client) -> None:
    requests = await running(certain, "one", "two", "three")
    await certain.post("/abort_request", {"abort_all": True})
    for request in requests:
        assert_cut(await request.done(), "v7")


async def test_pause_abort_cuts_what_runs_and_holds_what_comes(certain: Client, always: Always) -> None:
    (cut,) = await running(certain, "cut")
    await certain.pause("abort")
    assert_cut(await cut.done(), "v7")
    later = certain.begin([1], "later", max_new_tokens=2)
    await certain.update(always(9), "v9")
    await certain.resume()
    reader = await later.done()
    assert (reader.output.ids, spans_of(reader)) == ([9, 9], [("v9", 0, 2)])


async def test_retract_gives_one_answer_with_two_spans_and_the_tokens_of_both(
    certain: Client, always: Always
) -> None:
    (held,) = await running(certain, "held")
    await certain.pause("retract")
    assert (await certain.post("/flush_cache", {}))[0] == 200
    await certain.update(always(9), "v9")
    await certain.resume()
    reader = await held.done()
    cut = reader.output.spans[0].stop
    assert 3 <= cut < 400
    assert spans_of(reader) == [("v7", 0, cut), ("v9", cut, 400)]
    assert reader.output.ids == [7] * cut + [9] * (400 - cut)
    assert len(reader.output.logprobs) == 400
    assert (reader.meta["num_retractions"], reader.meta["prompt_tokens"]) == (1, 2)
    assert reader.meta["weight_version"] == "v9"


async def test_in_place_splits_the_span_at_the_exact_token(certain: Client, always: Always) -> None:
    (held,) = await running(certain, "in-place")
    await certain.pause("in_place")
    assert (await certain.post("/flush_cache", {}))[0] == 400
    await certain.update(always(9), "v9", flush_cache=False)
    await certain.resume()
    reader = await held.done()
    cut = reader.output.spans[0].stop
    assert spans_of(reader) == [("v7", 0, cut), ("v9", cut, 400)]
    assert reader.output.ids == [7] * cut + [9] * (400 - cut)
    assert reader.meta["num_retractions"] == 0


async def test_in_place_with_a_flush_updates_and_answers_400(certain: Client, always: Always) -> None:
    (held,) = await running(certain, "flush")
    await certain.pause("in_place")
    status, outcome = await certain.try_update(always(9), "v9")
    assert (status, outcome["success"]) == (400, False)
    assert outcome["message"].startswith("Weights were updated, but the cache was not flushed")
    await certain.resume()
    assert (await held.done()).output.ids[-1] == 9
    await certain.update(always(9), "v9")  # the label is certain only now
    assert await certain.version() == "v9"


async def test_an_update_without_a_pause_waits_for_what_runs(certain: Client, always: Always) -> None:
    (before,) = await running(certain, "before", tokens=100)
    await certain.update(always(9), "v9")
    reader = await before.done()
    assert (reader.output.ids, spans_of(reader)) == ([7] * 100, [("v7", 0, 100)])
    assert (await certain.generate([1], max_new_tokens=2))["output_ids"] == [9, 9]


async def test_an_update_with_abort_all_requests_does_not_wait(certain: Client, always: Always) -> None:
    requests = await running(certain, "one", "two")
    await certain.update(always(9), "v9", abort_all_requests=True)
    for request in requests:
        assert_cut(await request.done(), "v7")


async def test_a_bad_path_leaves_weights_and_version(certain: Client, tmp_path: Path) -> None:
    status, outcome = await certain.try_update(tmp_path / "nowhere", "v8")
    assert (status, outcome["success"]) == (400, False)
    assert "nowhere" in outcome["message"]
    answer = await certain.generate([1], max_new_tokens=2)
    assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == ([7, 7], "v7")


async def test_an_update_says_where_the_weights_came_from(certain: Client, always: Always) -> None:
    await certain.update(always(9), "v9")
    info = (await certain.get("/model_info"))[1]
    assert (info["model_path"], info["weight_version"]) == (str(always(9)), "v9")


async def test_a_new_label_without_weights_splits_the_span(certain: Client) -> None:
    (request,) = await running(certain, "label")
    body = {"new_version": "label", "abort_all_requests": False}
    assert (await certain.post("/update_weight_version", body))[1]["new_version"] == "label"
    reader = await request.done()
    assert [version for version, _, _ in spans_of(reader)] == ["v7", "label"]
    assert reader.output.ids == [7] * 400


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_ends_its_request(certain: Client, streamed: bool) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 500}, "stream": streamed}
    many = [asyncio.create_task(certain.post("/generate", body)) for _ in range(4)]
    await certain.until_load(lambda load: load["num_running_reqs"] == 4)
    for task in many:
        task.cancel()
    await certain.until_load(lambda load: load["num_running_reqs"] == 0)


async def test_after_the_proxys_update_no_key_of_the_old_weights_is_left(
    engine: EngineProcess, certain: Client, always: Always
) -> None:
    """Requests whose clients have gone still run when the update comes: SGLang then keeps its cache."""
    prompt = [9, 8, 7, 6, 5, 4, 3, 2]
    gone = [certain.begin(prompt, f"gone-{i}", max_new_tokens=400) for i in range(4)]
    for request in gone:
        await request.until_tokens(3)
        await request.leave()
    async with engine_http() as http:
        updated = Engine(engine.base_url, http, timeout_s=60)
        await updated.update_weights(str(always(9)), "v9")
    answer = await certain.generate(prompt, max_new_tokens=2)
    assert answer["output_ids"] == [9, 9]
    assert answer["meta_info"]["cached_tokens"] == 0
