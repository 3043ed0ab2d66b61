"""Reuse of cached keys: it saves work, changes nothing, and never outlives the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_client import Client

from stack.engine.prefixes import Prefixes


def keys_values(length: int) -> torch.Tensor:
    """Eight bytes a position."""
    return torch.zeros(1, 2, 1, length, 1)


def found_length(prefixes: Prefixes, tokens: list[int]) -> int:
    found = prefixes.find(tokens)
    return 0 if found is None else found.shape[3]


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ([1, 2, 3, 4, 5, 6], 5),  # a next turn: all of the longer entry
        ([1, 2, 3, 9], 3),  # leaves the entry after its prompt
        ([1, 2, 9], 0),  # leaves it inside: only whole entries and their prompts are found
        ([1, 2, 3], 2),  # the same prompt again: its last token is computed
        ([7, 8, 9], 2),
        ([7], 0),
        ([5], 0),
    ],
)
def test_find_takes_the_longest_stored_beginning(tokens: list[int], length: int) -> None:
    prefixes = Prefixes(1000)
    prefixes.keep([1, 2, 3, 4, 5], 3, keys_values(5))
    prefixes.keep([7, 8], 2, keys_values(2))
    assert found_length(prefixes, tokens) == length


def test_the_least_recently_used_entry_leaves() -> None:
    prefixes = Prefixes(8 * 9)
    for first in (1, 2, 3):
        prefixes.keep([first, 0, 0], 1, keys_values(3))
    assert found_length(prefixes, [1, 0, 0, 5]) == 3  # 1 is used again, so 2 is the oldest
    prefixes.keep([4, 0, 0], 1, keys_values(3))
    assert [found_length(prefixes, [first, 0, 0, 5]) for first in (1, 2, 3, 4)] == [3, 0, 3, 3]
    prefixes.keep([5] * 10, 1, keys_values(10))  # larger than everything
    assert found_length(prefixes, [5] * 11) == 0


async def turn(client: Client, prompt: list[int], seed: int = 1) -> Any:
    return await client.generate(prompt, max_new_tokens=5, sampling_seed=seed)


@pytest.mark.engine
async def test_a_next_turn_reuses_the_last_and_scores_the_same(client: Client) -> None:
    await client.post("/flush_cache", {})
    first = await turn(client, [1, 2, 3])
    prompt = [1, 2, 3, *first["output_ids"], 9]
    second = await turn(client, prompt)
    assert (first["meta_info"]["cached_tokens"], second["meta_info"]["cached_tokens"]) == (0, 7)
    assert (await client.post("/flush_cache", {}))[0] == 200
    again = await turn(client, prompt)
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == second["output_ids"]
    for (a, _, _), (b, _, _) in zip(
        again["meta_info"]["output_token_logprobs"], second["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.engine
async def test_rows_with_and_without_a_prefix_share_a_prefill(client: Client) -> None:
    await client.post("/flush_cache", {})
    alone = [await turn(client, [s, s, s, *range(s)], seed=s) for s in range(1, 20)]
    both = await asyncio.gather(*[turn(client, [s, s, s, *range(s)], seed=s) for s in range(1, 25)])
    assert [a["output_ids"] for a in alone] == [b["output_ids"] for b in both[:19]]
    assert {b["meta_info"]["cached_tokens"] > 0 for b in both[:19]} == {True}
    assert {b["meta_info"]["cached_tokens"] for b in both[19:]} == {0}


@pytest.mark.engine
async def test_new_weights_never_see_old_keys(slow: Client, always: Callable[[int], Path]) -> None:
    await turn(slow, [1, 2, 3])
    running = asyncio.create_task(slow.generate([4, 5, 6], max_new_tokens=20))
    await slow.until_load(lambda load: load["num_running_reqs"] == 1)
    await slow.post("/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(always(9)), "weight_version": "v9", "flush_cache": False}
    assert (await slow.post("/update_weights_from_disk", body))[0] == 200
    await slow.post("/continue_generation", {})
    await running  # its keys are of both weights
    for prompt in ([1, 2, 3, 9], [4, 5, 6, 9]):
        assert (await turn(slow, prompt))["meta_info"]["cached_tokens"] == 0
