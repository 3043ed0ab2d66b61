from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from rollout.agent_api import Finish, Task, load_agent
from rollout.client import Generation, Session
from rollout.tasks import dial
from schemas.settings import Settings

Policy = Callable[[Sequence[int], int], list[int]]


class ScriptedSession:
    """Answers by a policy, within the budget and up to the stop token, as an engine does; keeps what it was asked."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.contexts: list[list[int]] = []

    async def generate(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Generation:
        self.contexts.append(list(input_ids))
        said = self.policy(input_ids, sampling_params["max_new_tokens"])[: sampling_params["max_new_tokens"]]
        for stop in sampling_params["stop_token_ids"]:
            if stop in said:
                said = said[: said.index(stop) + 1]
        return Generation(said, [], "length", {})


async def play(policy: Policy, seed: int = 7) -> tuple[Finish, ScriptedSession]:
    session = ScriptedSession(policy)
    finish = await dial.agent(Task({"seed": seed}, 0, 0, cast("Session", session)))
    return finish, session


def perfect(context: Sequence[int], budget: int) -> list[int]:
    return [(context[-1] + 1 + k) % 10 for k in range(budget)]


def test_the_vocabulary_has_25_different_tokens_and_digits_are_themselves() -> None:
    assert len(set(dial.ALPHABET)) == len(dial.ALPHABET) == 25
    assert [dial.ID[str(d)] for d in range(10)] == list(range(10))


async def test_turning_forward_gets_everything() -> None:
    finish, _ = await play(perfect)
    assert finish.reward == 1.0
    assert finish.components == {"perfect_turns": 1.0}
    assert finish.status == "completed"


async def test_random_tokens_get_next_to_nothing() -> None:
    rng = random.Random(0)
    rewards = [
        (await play(lambda _, n: [rng.randrange(32) for _ in range(n)], seed))[0].reward
        for seed in range(300)
    ]
    assert sum(r for r in rewards if r is not None) / 300 == pytest.approx(0.01, abs=0.006)


async def test_silence_gets_nothing_and_is_not_punished() -> None:
    finish, _ = await play(lambda _, n: [dial.SEMICOLON] * n)
    assert finish.reward == 0.0


async def test_the_context_is_only_ever_appended_to() -> None:
    finish, session = await play(perfect)
    assert finish.reward == 1.0
    assert len(session.contexts) == dial.TURNS
    for earlier, later in zip(session.contexts, session.contexts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert session.contexts[0][:2] == [dial.ID["="], dial.ID["u"]]
    assert session.contexts[1][-3] == dial.ID["+"]


async def test_later_turns_show_the_digit_last_said() -> None:
    _, session = await play(lambda context, _: [(context[-1] + 1) % 10, dial.SEMICOLON])
    shown = [context[-1] for context in session.contexts]
    assert shown == [(shown[0] + k) % 10 for k in range(dial.TURNS)]
    assert session.contexts[1][-3] == dial.ID["-"]  # one of at least six is less than half


def test_all_samples_of_a_prompt_see_the_same_ring() -> None:
    one, other = dial.Dial(11), dial.Dial(11)
    assert (one.position, one.budgets) == (other.position, other.budgets)
    assert {(dial.Dial(s).position) for s in range(200)} == set(range(10))
    assert {b for s in range(200) for b in dial.Dial(s).budgets} == set(range(6, 15))


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ([4, 5, 6], 3),
        ([5, 6, 7], 2),  # the first one skipped a digit
        ([4, dial.ID["u"], 5, 6], 2),  # after a sign nothing is a successor; then 5, 6 again is
        ([9, 0, 1], 2),  # the ring closes
        ([4, dial.SEMICOLON, 5, 6], 1),
        ([31, 25, 4], 0),
        ([3, 3, 3], 0),
        ([], 0),
    ],
)
def test_what_counts(said: list[int], right: int) -> None:
    game = dial.Dial(0)
    game.position = 3
    budget = game.budget
    assert game.act(said) == pytest.approx(right / budget)


def test_tokens_behind_the_budget_do_not_count() -> None:
    game = dial.Dial(0)
    said = [(game.position + 1 + k) % 10 for k in range(40)]
    assert game.act(said) == 1.0


def test_the_dataset_depends_on_the_run_seed_alone() -> None:
    first = dial.dataset(Settings.model_validate({"run": {"seed": 1}}))
    assert first == dial.dataset(Settings.model_validate({"run": {"seed": 1}}))
    second = dial.dataset(Settings.model_validate({"run": {"seed": 2}}))
    assert not {p["seed"] for p in first} & {p["seed"] for p in second}


def test_agents_are_found_by_name() -> None:
    assert load_agent("rollout.tasks.dial:agent") is dial.agent
