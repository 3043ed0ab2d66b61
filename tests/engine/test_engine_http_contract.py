"""Shapes of SGLang's HTTP contract, on a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_client import Client

from stack.engine.launch import EngineProcess

pytestmark = pytest.mark.engine


async def test_an_answer_has_every_field_of_the_contract(client: Client) -> None:
    answer = await client.generate([30, 29, 28], rid="shape", max_new_tokens=4)
    meta = answer["meta_info"]
    assert sorted(answer) == ["meta_info", "output_ids"]
    assert sorted(meta) == [
        "cached_tokens",
        "cached_tokens_details",
        "completion_tokens",
        "dp_rank",
        "e2e_latency",
        "finish_reason",
        "id",
        "input_token_logprobs",
        "num_retractions",
        "output_token_logprobs",
        "output_token_logprobs_length",
        "prompt_tokens",
        "reasoning_tokens",
        "response_sent_to_client_ts",
        "weight_version",
        "weight_versions",
    ]
    assert meta["id"] == "shape"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 4}]
    assert [triple[1:] for triple in meta["output_token_logprobs"]] == [
        [t, None] for t in answer["output_ids"]
    ]
    assert meta["input_token_logprobs"] == []


async def test_logprobs_only_when_asked_for(client: Client) -> None:
    status, answer = await client.post(
        "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    )
    assert status == 200
    assert "output_token_logprobs" not in answer["meta_info"]


async def test_a_stop_token_ends_and_is_the_last_output(client: Client) -> None:
    free = (await client.generate([4], max_new_tokens=20, sampling_seed=1))["output_ids"]
    stop = free[5]
    answer = await client.generate([4], max_new_tokens=20, sampling_seed=1, stop_token_ids=[stop])
    assert answer["output_ids"] == free[: free.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    ignored = await client.generate(
        [4], max_new_tokens=20, sampling_seed=1, stop_token_ids=[stop], ignore_eos=True
    )
    assert ignored["output_ids"] == free


async def test_min_new_tokens_holds_the_stop_back(client: Client) -> None:
    answer = await client.generate(
        [4], max_new_tokens=40, min_new_tokens=39, stop_token_ids=list(range(1, 32))
    )
    assert answer["output_ids"][:39] == [0] * 39


async def test_a_scoring_call_returns_prompt_logprobs_and_no_token(client: Client) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    _, answer = await client.post("/generate", body | {"logprob_start_len": 0})
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    logprobs = answer["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in logprobs] == [5, 6, 7]
    assert logprobs[0][0] is None
    assert all(lp < 0 for lp, _, _ in logprobs[1:])


async def test_top_logprobs_are_the_most_probable_first(client: Client) -> None:
    body = {
        "input_ids": [5],
        "sampling_params": {"max_new_tokens": 2, "temperature": 0},
        "return_logprob": True,
    }
    _, answer = await client.post("/generate", body | {"top_logprobs_num": 3})
    meta = answer["meta_info"]
    for (lp, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[0][1] == token  # greedy
        assert top[0][0] == pytest.approx(lp)
        assert top[0][0] >= top[1][0] >= top[2][0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [1, 32]}, "Token id 32 in input_ids is out of the vocabulary (size 32)."),
        ({"input_ids": [-1]}, "Token id -1 in input_ids is out of the vocabulary (size 32)."),
        ({"input_ids": []}, "The input is empty."),
        ({}, "Exactly one of text and input_ids must be given."),
        ({"text": "hello"}, "text needs a tokenizer in the checkpoint directory; send input_ids."),
        (
            {"input_ids": [1] * 600},
            "The input (600 tokens) is longer than the model's context length (512 tokens).",
        ),
        (
            {"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": 13}},
            "You requested a total of 513 tokens",
        ),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be non-negative."),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1]."),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, "n must be 1: send one request per sample."),
        ({"input_ids": [1], "sampling_params": {"regex": "a*"}}, "regex is not supported by the CPU engine."),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "stop strings need a tokenizer"),
    ],
)
async def test_what_cannot_be_served_is_400_with_a_message(client: Client, body: Any, words: str) -> None:
    status, answer = await client.post("/generate", body)
    assert status == 400
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", b"{not json", "JSON is malformed"),
        ("/generate", {"input_ids": "abc"}, "$.input_ids"),
        ("/generate", {"input_ids": [1.5]}, "$.input_ids[0]"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"foo": 1}},
            "unknown field `foo`, expected one of `max_new",
        ),
        ("/pause_generation", {"mode": "gently"}, "gently"),
        ("/abort_request", {}, "one of rid and abort_all must be given"),
        ("/update_weights_from_disk", {}, "model_path"),
    ],
)
async def test_what_does_not_fit_the_contract_is_400_with_a_string(
    client: Client, path: str, body: Any, words: str
) -> None:
    status, answer = await client.post(path, body)
    assert status == 400
    assert words in answer["error"]


async def test_unknown_top_level_keys_are_ignored(client: Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "routing_key": "x", "whatever": 1}
    assert (await client.post("/generate", body))[0] == 200


async def test_a_stream_is_cumulative_and_ends_with_spans(client: Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 50}, "return_logprob": True}
    chunks = [chunk async for chunk in client.stream(body)]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert lengths == sorted(set(lengths))
    assert chunks[-1]["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 50}]
    for chunk in chunks[:-1]:
        assert chunk["output_ids"] == chunks[-1]["output_ids"][: len(chunk["output_ids"])]
        assert "weight_versions" not in chunk["meta_info"]
        assert chunk["meta_info"]["finish_reason"] is None


async def test_an_incremental_stream_is_deltas(slow: Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 12}, "return_logprob": True}
    chunks = [chunk async for chunk in slow.stream(body)]
    assert len(chunks) > 2
    assert [t for chunk in chunks for t in chunk["output_ids"]] == [7] * 12
    assert sum(len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks) == 12
    assert chunks[-1]["meta_info"]["completion_tokens"] == 12
    assert chunks[-1]["meta_info"]["output_token_logprobs_length"] == 12


async def test_information(client: Client, dial: Path) -> None:
    for path in ("/model_info", "/get_model_info"):
        status, info = await client.get(path)
        assert status == 200
        assert info["model_path"] == str(dial)
        assert info["weight_version"] == "v0"
        assert info["is_generation"] is True
        assert info["architectures"] == ["Qwen3ForCausalLM"]
    assert [(await client.get(path))[0] for path in ("/health", "/ready", "/server_info")] == [200, 200, 200]
    models = (await client.get("/v1/models"))[1]
    assert models["data"][0]["max_model_len"] == 512
    assert (await client.get("/get_weight_version"))[0] == 404
    assert (await client.get("/abort_request"))[0] == 405


async def test_text_and_stop_strings_where_there_is_a_tokenizer(word_model: Path) -> None:
    with EngineProcess(word_model) as process:
        async with Client(process.base_url) as client:
            sampling: dict[str, Any] = {"max_new_tokens": 12, "sampling_seed": 3}
            _, free = await client.post("/generate", {"text": "w1 w2", "sampling_params": sampling})
            words = [f"w{t}" for t in free["output_ids"]]
            assert free["text"] == " ".join(words)
            assert free["meta_info"]["prompt_tokens"] == 2
            stop = f"{words[4]} {words[5]}"
            _, cut = await client.post(
                "/generate", {"text": "w1 w2", "sampling_params": {**sampling, "stop": stop}}
            )
            assert cut["text"] == " ".join(words[:4]) + " "
            assert cut["output_ids"] == free["output_ids"][:6]
            assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
