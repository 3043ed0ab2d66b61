"""What our engine refuses and serves beyond the contract (`tests/engine_contract`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_client import Client

from stack.engine.launch import EngineProcess

pytestmark = pytest.mark.engine


async def test_min_new_tokens_holds_the_stop_back(client: Client) -> None:
    answer = await client.generate(
        [4], max_new_tokens=40, min_new_tokens=39, stop_token_ids=list(range(1, 32))
    )
    assert answer["output_ids"][:39] == [0] * 39


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [1, 32]}, "Token id 32 in input_ids is out of the vocabulary (size 32)."),
        ({"input_ids": [-1]}, "Token id -1 in input_ids is out of the vocabulary (size 32)."),
        ({"input_ids": [1], "text": "x"}, "not two of them"),
        ({"input_ids": [1], "sampling_params": {"min_p": 2}}, "min_p must be in [0, 1]."),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, "n must be 1: send one request per sample."),
        ({"input_ids": [1], "sampling_params": {"regex": "a*"}}, "regex is not supported by the CPU engine."),
    ],
)
async def test_what_cannot_be_served_is_400_with_a_message(client: Client, body: Any, words: str) -> None:
    status, answer = await client.post("/generate", body)
    assert status == 400
    assert words in answer["error"]["message"]


@pytest.mark.parametrize("ids", [[1.5], [None], [[1], [2]]])
async def test_what_is_no_list_of_token_ids_is_named(client: Client, ids: Any) -> None:
    status, answer = await client.post("/generate", {"input_ids": ids})
    assert status == 400
    assert "$.input_ids[0]" in answer["message"]


async def test_a_wrong_method_is_405(client: Client) -> None:
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
