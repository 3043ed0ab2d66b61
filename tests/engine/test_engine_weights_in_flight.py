"""What our engine does beyond the contract (`tests/engine_contract`) when weights change while requests run."""

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


async def update(slow: Client, path: Path, version: str) -> tuple[int, Any]:
    return await slow.try_update(path, version)


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
    await slow.pause("retract")
    assert (await updating)[0] == 200
    await slow.resume()
    assert [version for version, _, _ in spans_of(await running)] == ["v7", "v9"]


async def test_another_architecture_is_refused(slow: Client, always: Always, tmp_path: Path) -> None:
    config = (
        (always(9) / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    (tmp_path / "config.json").write_text(config)
    status, outcome = await update(slow, tmp_path, "v8")
    assert status == 400
    assert "layers differ" in outcome["message"]


async def test_abort_ends_exactly_the_named_request(slow: Client) -> None:
    one, ten = await started(slow, "q1", "q10", tokens=60)
    assert await slow.post("/abort_request", {"rid": "q1"}) == (200, "")
    assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await ten)["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert (await slow.post("/abort_request", {"rid": "nobody"}))[0] == 200


async def test_a_request_queued_behind_a_pause_can_be_aborted(slow: Client) -> None:
    await slow.pause("in_place")
    queued = asyncio.create_task(slow.generate([1], rid="queued"))
    await slow.until_load(lambda load: load["num_waiting_reqs"] == 1)
    await slow.post("/abort_request", {"rid": "queued"})
    answer = await queued
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    await slow.resume()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_ends_its_request(slow: Client, streamed: bool) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 500}, "stream": streamed}
    task = asyncio.create_task(slow.post("/generate", body))
    await slow.until_load(lambda load: load["num_running_reqs"] == 1)
    task.cancel()
    await slow.until_load(lambda load: load["num_running_reqs"] == 0, deadline_s=2.0)  # 500 tokens take 5 s
