"""Shapes, log-probs, ends and refusals, at every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_client import Client

from proxy.engine_stream import refusal
from proxy.engines import Engine, engine_http
from schemas.errors import EngineRejected
from stack.engine.launch import EngineProcess

META = [
    "cached_tokens",
    "cached_tokens_details",
    "completion_tokens",
    "dp_rank",
    "e2e_latency",
    "finish_reason",
    "id",
    "num_retractions",
    "prompt_tokens",
    "reasoning_tokens",
    "response_sent_to_client_ts",
    "weight_version",
    "weight_versions",
]
LOGPROBS = ["input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"]


async def test_an_answer_has_the_fields_of_the_contract(client: Client) -> None:
    answer = await client.generate([30, 29, 28], rid="shape", max_new_tokens=4)
    meta = answer["meta_info"]
    assert sorted(answer) == ["meta_info", "output_ids"]
    assert sorted(meta) == sorted(META + LOGPROBS)
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("shape", 3, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["weight_version"], meta["weight_versions"]) == (
        "v0",
        [{"version": "v0", "start": 0, "end": 4}],
    )
    assert [triple[1:] for triple in meta["output_token_logprobs"]] == [
        [t, None] for t in answer["output_ids"]
    ]
    assert (meta["output_token_logprobs_length"], meta["input_token_logprobs"]) == (4, [])


async def test_logprobs_come_only_when_asked_for(client: Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert sorted((await client.post("/generate", body))[1]["meta_info"]) == META


async def test_the_logprobs_of_a_sample_are_those_that_a_scoring_call_gives(client: Client) -> None:
    prompt = [3, 1, 4, 1, 5]
    answer = await client.generate(prompt, max_new_tokens=12)
    body = {"input_ids": prompt + answer["output_ids"], "return_logprob": True, "logprob_start_len": 0}
    _, scored = await client.post("/generate", body | {"sampling_params": {"max_new_tokens": 0}})
    meta = scored["meta_info"]
    assert scored["output_ids"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["input_token_logprobs"][0] == [None, 3, None]
    assert [t for _, t, _ in meta["input_token_logprobs"]] == body["input_ids"]
    sampled = [lp for lp, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert [lp for lp, _, _ in meta["input_token_logprobs"][5:]] == pytest.approx(sampled, abs=1e-4)


async def test_temperature_0_takes_the_most_probable(client: Client) -> None:
    body = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 3}
    _, answer = await client.post(
        "/generate", body | {"sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    )
    meta = answer["meta_info"]
    for (lp, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0] == [pytest.approx(lp), token, None]
        assert top[0][0] >= top[1][0] >= top[2][0]


async def test_a_stop_token_ends_and_is_the_last_output(certain: Client) -> None:
    answer = await certain.generate([4], max_new_tokens=20, stop_token_ids=[7])
    assert answer["output_ids"] == [7]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 7}
    ignored = await certain.generate([4], max_new_tokens=5, stop_token_ids=[7], ignore_eos=True)
    assert ignored["output_ids"] == [7] * 5


async def test_a_stop_token_that_is_the_last_permitted_one_ends_by_stop(certain: Client) -> None:
    answer = await certain.generate([4], max_new_tokens=1, stop_token_ids=[7])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 7}


async def test_a_stop_token_out_of_the_vocabulary_stops_nothing(client: Client) -> None:
    answer = await client.generate([4], max_new_tokens=3, stop_token_ids=[99])
    assert len(answer["output_ids"]) == 3


async def test_the_prompt_can_be_asked_for(client: Client) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
    assert (await client.post("/generate", body))[1]["prompt_token_ids"] == [1, 2]


async def test_a_next_turn_reuses_the_keys_of_the_last_until_the_weights_change(
    client: Client, dial: Path
) -> None:
    first = [9, 8, 7, 6, 5, 4, 3, 2]
    said = (await client.generate(first, max_new_tokens=4))["output_ids"]
    second = [*first, *said, 1, 2]
    cached = (await client.generate(second, max_new_tokens=1))["meta_info"]
    assert 8 <= cached["cached_tokens"] <= 12
    assert cached["cached_tokens_details"] == {"device": cached["cached_tokens"], "host": 0}
    await client.update(dial, "v1")
    fresh = (await client.generate(second, max_new_tokens=1))["meta_info"]
    assert (fresh["cached_tokens"], fresh["cached_tokens_details"]) == (0, None)


async def test_unknown_top_level_keys_are_ignored(client: Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "whatever": 1}
    assert (await client.post("/generate", body))[0] == 200


async def test_an_unknown_sampling_field_is_named(client: Client) -> None:
    status, answer = await client.post("/generate", {"input_ids": [1], "sampling_params": {"foo": 1}})
    assert status == 400
    assert answer["error"].startswith("unknown field `foo`, expected one of `max_new_tokens`")


LONG = "The input (600 tokens) is longer than the model's context length (512 tokens)."


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"text": "hello"}, "cannot accept text prompts"),
        ({"input_ids": [1] * 600}, LONG),
        ({"input_ids": [1] * 512}, "The input (512 tokens) is longer than"),
        (
            {"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": 13}},
            "You requested a total of 513 tokens: 500 tokens from the input messages and 13 tokens for the completion.",
        ),
        (
            {"input_ids": [1], "sampling_params": {"temperature": -1}},
            "temperature must be a non-negative finite number, got -1.",
        ),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1], got 0."),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "unavailable when skip_tokenizer_init=True"),
    ],
)
async def test_what_cannot_be_served_is_400_with_a_message(client: Client, body: Any, words: str) -> None:
    status, answer = await client.post("/generate", body)
    assert status == 400
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", b"{not json", "JSON"),
        ("/generate", {"input_ids": "abc"}, "input_ids"),
        ("/pause_generation", {"mode": "gently"}, "gently"),
        ("/update_weights_from_disk", {}, "model_path"),
    ],
)
async def test_what_does_not_fit_the_contract_is_400_of_a_third_shape(
    client: Client, path: str, body: Any, words: str
) -> None:
    status, answer = await client.post(path, body)
    assert (status, answer["object"], answer["type"], answer["code"]) == (400, "error", "Bad Request", 400)
    assert words in answer["message"]
    rejected = refusal(answer, status)
    assert isinstance(rejected, EngineRejected)
    assert words in rejected.message


async def test_a_live_id_cannot_be_used_twice(certain: Client) -> None:
    running = certain.begin([1], "twice", max_new_tokens=400)
    await running.until_tokens(1)
    status, answer = await certain.post("/generate", {"input_ids": [1], "rid": "twice"})
    assert status == 400
    assert "Duplicate request ID detected: twice" in answer["error"]["message"]
    await certain.post("/abort_request", {"rid": "twice"})
    await running.done()
    assert (await certain.generate([1], rid="twice", max_new_tokens=1))["output_ids"] == [7]


async def test_a_stream_is_cumulative_and_its_last_event_has_the_spans(client: Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 50}, "return_logprob": True}
    chunks = [chunk async for chunk in client.stream(body)]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1
    assert chunks[-1]["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 50}]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 50}
    for chunk in chunks[:-1]:
        assert chunk["output_ids"] == chunks[-1]["output_ids"][: len(chunk["output_ids"])]
        assert chunk["meta_info"]["weight_version"] == "v0"
        assert chunk["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in chunk["meta_info"]


async def test_a_stream_may_tell_several_tokens_at_a_time_but_the_first_at_once(client: Client) -> None:
    sampling = {"max_new_tokens": 50, "stream_interval": 16}
    body = {"input_ids": [1], "sampling_params": sampling, "return_logprob": True}
    chunks = [chunk async for chunk in client.stream(body)]
    told = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert set(told) <= {1, 17, 33, 49, 50}  # one that was not yet sent when the next came is left out
    assert told[-1] == 50
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == 50


async def test_the_proxy_learns_an_engines_limits_and_label(engine: EngineProcess, client: Client) -> None:
    async with engine_http() as http:
        seen = Engine(engine.base_url, http, timeout_s=30)
        await seen.refresh()
    assert (seen.version, seen.vocab_size, seen.context_length, seen.up) == ("v0", 32, 512, True)


async def test_information(client: Client, dial: Path) -> None:
    for path in ("/model_info", "/get_model_info"):
        status, info = await client.get(path)
        assert status == 200
        assert (info["model_path"], info["weight_version"]) == (str(dial), "v0")
        assert (info["is_generation"], info["architectures"]) == (True, ["Qwen3ForCausalLM"])
    assert [(await client.get(path))[0] for path in ("/health", "/ready", "/server_info")] == [200, 200, 200]
    assert (await client.get("/v1/models"))[1]["data"][0]["max_model_len"] == 512
    assert (await client.get("/get_weight_version"))[0] == 404


async def test_a_logit_bias_is_added_before_the_temperature_and_a_wrong_one_is_refused(
    client: Client,
) -> None:
    body = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 32}

    async def first(**sampling: Any) -> dict[int, float]:
        asked = {"max_new_tokens": 1, "temperature": 2.0, **sampling}
        _, answer = await client.post("/generate", body | {"sampling_params": asked})
        return {token: lp for lp, token, _ in answer["meta_info"]["output_top_logprobs"][0]}

    without, with_bias = await first(), await first(logit_bias={"7": 3.0})
    others = [t for t in without.keys() & with_bias.keys() if t != 7][:5]
    gained = [with_bias[7] - with_bias[t] - (without[7] - without[t]) for t in others]
    assert gained == pytest.approx([1.5] * 5, abs=1e-3)  # 3 / temperature 2
    for wrong in ({"99999999": 1.0}, {"-1": 1.0}):
        status, _ = await client.post(
            "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1, "logit_bias": wrong}}
        )
        assert status == 400


async def test_penalties_count_the_output_of_the_call_and_not_its_prompt(client: Client) -> None:
    body = {"input_ids": [5, 7, 7, 7], "return_logprob": True, "top_logprobs_num": 32}

    async def first(**sampling: Any) -> list[float]:
        _, answer = await client.post(
            "/generate", body | {"sampling_params": {"max_new_tokens": 1, **sampling}}
        )
        return sorted(lp for lp, _, _ in answer["meta_info"]["output_top_logprobs"][0])

    plain = await first()
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert await first(**penalty) == pytest.approx(plain, abs=1e-4)
