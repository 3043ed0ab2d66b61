"""A seeded request repeats exactly, alone or in company, whole or in two halves; its log-probs are the
model's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_client import Client

from stack.engine.launch import EngineProcess

pytestmark = pytest.mark.engine

PROMPTS = [[(3 * i + j) % 25 for j in range(2 + 5 * (i % 4))] for i in range(24)]


async def seeded(client: Client, seed: int, **more: Any) -> Any:
    return await client.generate(PROMPTS[seed], max_new_tokens=6 + seed % 9, sampling_seed=seed, **more)


async def test_alone_and_in_company_give_the_same_tokens(client: Client) -> None:
    together = await asyncio.gather(*[seeded(client, seed) for seed in range(24)])
    for seed in (0, 7, 23):
        alone = await seeded(client, seed)
        assert alone["output_ids"] == together[seed]["output_ids"]
        for (a, _, _), (b, _, _) in zip(
            alone["meta_info"]["output_token_logprobs"],
            together[seed]["meta_info"]["output_token_logprobs"],
            strict=True,
        ):
            assert a == pytest.approx(b, abs=1e-5)


async def test_company_with_other_kinds_of_sampling_changes_nothing(client: Client) -> None:
    alone = await seeded(client, 3)
    others = [
        seeded(client, 4, temperature=0),
        seeded(client, 5, top_p=0.5),
        seeded(client, 6, frequency_penalty=1.0),
        seeded(client, 8, top_k=3, min_p=0.1),
    ]
    again, *_ = await asyncio.gather(seeded(client, 3), *others)
    assert again["output_ids"] == alone["output_ids"]


async def test_samples_of_one_prompt_differ_by_seed_and_share_their_prefill(client: Client) -> None:
    answers = await asyncio.gather(
        *[client.generate([1, 2, 3, 4], max_new_tokens=8, sampling_seed=s) for s in range(8)]
    )
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 8


async def test_two_halves_of_a_request_are_the_whole(client: Client) -> None:
    """An aborted request that is sent again with its partial output continues the same random stream."""
    whole = (await client.generate([1, 2], max_new_tokens=12, sampling_seed=5))["output_ids"]
    first = (await client.generate([1, 2], max_new_tokens=5, sampling_seed=5))["output_ids"]
    second = (await client.generate([1, 2, *first], max_new_tokens=7, sampling_seed=5))["output_ids"]
    assert first + second == whole


async def test_without_seeds_the_servers_seed_decides(dial: Path) -> None:
    async def sequence(random_seed: int) -> list[list[int]]:
        with EngineProcess(dial, random_seed=random_seed) as process:
            async with Client(process.base_url) as client:
                return [(await client.generate([1, 2], max_new_tokens=8))["output_ids"] for _ in range(2)]

    first, again, other = [await sequence(seed) for seed in (1, 1, 2)]
    assert first == again != other
    assert first[0] != first[1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_a_transformers_forward(
    client: Client, dial: Path, temperature: float
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dial, dtype=torch.float32)
    answers = await asyncio.gather(*[seeded(client, seed, temperature=temperature) for seed in range(24)])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        output = torch.tensor(answer["output_ids"])
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer["output_ids"]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, output[:, None]).squeeze(1)
        found = torch.tensor([lp for lp, _, _ in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)


async def test_prompt_logprobs_are_those_of_a_transformers_forward(client: Client, dial: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = [i % 25 for i in range(40)]
    model = AutoModelForCausalLM.from_pretrained(dial, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    _, answer = await client.post("/generate", body | {"logprob_start_len": 10})
    found = answer["meta_info"]["input_token_logprobs"]
    assert found[0] == [None, prompt[10], None]
    assert [token for _, token, _ in found] == prompt[10:]
    expected = [logprobs[i - 1, prompt[i]].item() for i in range(11, 40)]
    assert [lp for lp, _, _ in found[1:]] == pytest.approx(expected, abs=1e-5)


async def test_long_prompts_are_prefilled_in_chunks(dial: Path) -> None:
    """A prompt over one chunk (512) gives what its first part and the rest of it give."""
    prompt = [i * i % 25 for i in range(700)]
    with EngineProcess(dial, context_length=1024) as process:
        async with Client(process.base_url) as client:
            whole = await client.generate(prompt, max_new_tokens=3, temperature=0)
            scored = await client.post(
                "/generate",
                {
                    "input_ids": prompt + whole["output_ids"],
                    "sampling_params": {"max_new_tokens": 0},
                    "return_logprob": True,
                    "logprob_start_len": 699,
                },
            )
    found = [lp for lp, _, _ in scored[1]["meta_info"]["input_token_logprobs"][1:]]
    assert found == pytest.approx([lp for lp, _, _ in whole["meta_info"]["output_token_logprobs"]], abs=1e-5)
