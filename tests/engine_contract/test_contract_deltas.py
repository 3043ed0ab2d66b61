"""Streams of an engine that was started with `--incremental-streaming-output`."""

from __future__ import annotations

import pytest
from engine_client import Client

pytestmark = pytest.mark.deltas


async def test_a_stream_is_deltas_and_its_counts_are_totals(certain: Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 12}, "return_logprob": True}
    chunks = [chunk async for chunk in certain.stream(body)]
    assert len(chunks) > 2
    assert [t for chunk in chunks for t in chunk["output_ids"]] == [7] * 12
    assert sum(len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks) == 12
    assert chunks[-1]["meta_info"]["completion_tokens"] == 12
    assert chunks[-1]["meta_info"]["output_token_logprobs_length"] == 12
    assert chunks[-1]["meta_info"]["weight_versions"] == [{"version": "v7", "start": 0, "end": 12}]


async def test_an_aborted_stream_has_every_token_once(certain: Client) -> None:
    running = certain.begin([1], "cut", max_new_tokens=400)
    await running.until_tokens(5)
    await certain.post("/abort_request", {"rid": "cut"})
    reader = await running.done()
    assert reader.finish is not None
    assert reader.finish["type"] == "abort"
    assert len(reader.output.ids) == len(reader.output.logprobs) == reader.meta["completion_tokens"]
    assert set(reader.output.ids) == {7}
