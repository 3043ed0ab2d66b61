"""Pause, abort and weight changes while requests run: tokens really change, and the spans say where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_client import Client

pytestmark = pytest.mark.engine

Always = Callable[[int], Path]


async def started(slow: Client, *rids: str, tokens: int = 200) -> list[asyncio.Task[Any]]:
    """Requests that run and have produced some tokens."""
    tasks = [asyncio.create_task(slow.generate([1, 2], rid=rid, max_new_tokens=tokens)) for rid in rids]
    await slow.until_load(lambda load: load["num_running_reqs"] == len(rids))
    await slow.until_tokens(3)
    return tasks


def spans_of(answer: Any) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]


async def pause(slow: Client, mode: str) -> None:
    assert await slow.post("/pause_generation", {"mode": mode}) == (
        200,
        {"message": "Generation paused successfully.", "status": "ok"},
    )


async def resume(slow: Client) -> None:
    assert await slow.post("/continue_generation", {}) == (
        200,
        {"message": "Generation continued successfully.", "status": "ok"},
    )


async def update(slow: Client, path: Path, version: str, **more: Any) -> tuple[int, Any]:
    body = {"model_path": str(path), "weight_version": version, **more}
    return await slow.post("/update_weights_from_disk", body)


async def test_retract_gives_one_response_with_two_spans_and_the_new_weights_tokens(
    slow: Client, always: Always
) -> None:
    (task,) = await started(slow, "retract", tokens=40)
    await pause(slow, "retract")
    assert await slow.post("/flush_cache", {}) == (200, "Cache flushed.\n")
    assert (await update(slow, always(9), "v9"))[0] == 200
    await resume(slow)
    answer = await task
    (first, second) = spans_of(answer)
    cut = first[2]
    assert (first, second) == (("v7", 0, cut), ("v9", cut, 40))
    assert answer["output_ids"] == [7] * cut + [9] * (40 - cut)
    assert 0 < cut < 40
    assert answer["meta_info"]["num_retractions"] == 1
    assert answer["meta_info"]["weight_version"] == "v9"
    assert answer["meta_info"]["prompt_tokens"] == 2


async def test_in_place_keeps_the_cache_and_splits_the_span(slow: Client, always: Always) -> None:
    (task,) = await started(slow, "in-place", tokens=40)
    await pause(slow, "in_place")
    assert (await slow.post("/flush_cache", {}))[0] == 400
    assert (await update(slow, always(9), "v9", flush_cache=False))[0] == 200
    await resume(slow)
    answer = await task
    (first, second) = spans_of(answer)
    assert answer["output_ids"] == [7] * first[2] + [9] * (40 - first[2])
    assert (first[0], second[0], second[2]) == ("v7", "v9", 40)
    assert answer["meta_info"]["num_retractions"] == 0


async def test_in_place_with_flush_updates_and_answers_400(slow: Client, always: Always) -> None:
    (task,) = await started(slow, "flush", tokens=30)
    await pause(slow, "in_place")
    status, outcome = await update(slow, always(9), "v9")
    assert status == 400
    assert outcome["message"].startswith("Weights were updated, but the cache was not flushed")
    assert (await slow.get("/model_info"))[1]["weight_version"] == "v9"
    await resume(slow)
    assert (await task)["output_ids"][-1] == 9


async def test_pause_abort_returns_partial_outputs_and_holds_new_requests(
    slow: Client, always: Always
) -> None:
    (task,) = await started(slow, "aborted")
    await pause(slow, "abort")
    partial = await task
    assert partial["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    assert partial["output_ids"] == [7] * partial["meta_info"]["completion_tokens"] != []
    assert len(partial["meta_info"]["output_token_logprobs"]) == len(partial["output_ids"])
    queued = asyncio.create_task(slow.generate([1], max_new_tokens=2))
    await slow.until_load(lambda load: load["num_waiting_reqs"] == 1)
    assert (await update(slow, always(9), "v9"))[0] == 200
    await resume(slow)
    answer = await queued
    assert (answer["output_ids"], spans_of(answer)) == ([9, 9], [("v9", 0, 2)])


async def test_an_update_without_pause_waits_for_what_runs_and_holds_what_comes(
    slow: Client, always: Always
) -> None:
    (running,) = await started(slow, "before", tokens=40)
    updating = asyncio.create_task(update(slow, always(9), "v9"))
    await slow.until_tokens(3)  # the update has arrived, and waits
    later = asyncio.create_task(slow.generate([1], max_new_tokens=2))
    before, (status, outcome), after = await asyncio.gather(running, updating, later)
    assert (status, outcome["success"]) == (200, True)
    assert (before["output_ids"], spans_of(before)) == ([7] * 40, [("v7", 0, 40)])
    assert (after["output_ids"], spans_of(after)) == ([9, 9], [("v9", 0, 2)])


async def test_a_waiting_update_is_let_in_by_a_pause(slow: Client, always: Always) -> None:
    (running,) = await started(slow, "paused", tokens=60)
    updating = asyncio.create_task(update(slow, always(9), "v9"))
    await slow.until_tokens(3)
    await pause(slow, "retract")
    assert (await updating)[0] == 200
    await resume(slow)
    assert [version for version, _, _ in spans_of(await running)] == ["v7", "v9"]


async def test_an_update_with_abort_all_requests_does_not_wait(slow: Client, always: Always) -> None:
    tasks = await started(slow, "one", "two")
    assert (await update(slow, always(9), "v9", abort_all_requests=True))[0] == 200
    for answer in await asyncio.gather(*tasks):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["meta_info"]["weight_version"] == "v7"


async def test_a_bad_path_leaves_weights_and_version(slow: Client, tmp_path: Path) -> None:
    status, outcome = await update(slow, tmp_path / "nowhere", "v8")
    assert status == 400
    assert outcome["success"] is False
    assert "nowhere" in outcome["message"]
    answer = await slow.generate([1], max_new_tokens=2)
    assert (answer["output_ids"], spans_of(answer)) == ([7, 7], [("v7", 0, 2)])


async def test_another_architecture_is_refused(slow: Client, always: Always, tmp_path: Path) -> None:
    config = (
        (always(9) / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    (tmp_path / "config.json").write_text(config)
    status, outcome = await update(slow, tmp_path, "v8")
    assert status == 400
    assert "layers differ" in outcome["message"]


async def test_a_new_label_without_weights_splits_the_span(slow: Client) -> None:
    (task,) = await started(slow, "label", tokens=40)
    body = {"new_version": "label", "abort_all_requests": False}
    assert (await slow.post("/update_weight_version", body))[1]["new_version"] == "label"
    answer = await task
    assert [version for version, _, _ in spans_of(answer)] == ["v7", "label"]
    assert answer["output_ids"] == [7] * 40


async def test_abort_ends_exactly_the_named_request(slow: Client) -> None:
    one, ten = await started(slow, "q1", "q10", tokens=60)
    assert await slow.post("/abort_request", {"rid": "q1"}) == (200, "")
    assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await ten)["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert (await slow.post("/abort_request", {"rid": "nobody"}))[0] == 200


async def test_a_request_queued_behind_a_pause_can_be_aborted(slow: Client) -> None:
    await pause(slow, "in_place")
    queued = asyncio.create_task(slow.generate([1], rid="queued"))
    await slow.until_load(lambda load: load["num_waiting_reqs"] == 1)
    await slow.post("/abort_request", {"rid": "queued"})
    answer = await queued
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    await resume(slow)


async def test_a_live_id_cannot_be_used_twice(slow: Client) -> None:
    (task,) = await started(slow, "twice")
    status, answer = await slow.post("/generate", {"input_ids": [1], "rid": "twice"})
    assert (status, answer["error"]["message"]) == (400, "Duplicate request ID detected: twice")
    await slow.post("/abort_request", {"rid": "twice"})
    await task
    assert (await slow.generate([1], rid="twice", max_new_tokens=1))["output_ids"] == [7]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_ends_its_request(slow: Client, streamed: bool) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 500}, "stream": streamed}
    task = asyncio.create_task(slow.post("/generate", body))
    await slow.until_load(lambda load: load["num_running_reqs"] == 1)
    task.cancel()
    await slow.until_load(lambda load: load["num_running_reqs"] == 0, deadline_s=2.0)  # 500 tokens take 5 s
