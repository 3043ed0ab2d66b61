from __future__ import annotations

import pytest

from rollout.tasks.arithmetic import MAX_NEW_TOKENS, dataset, is_right, question, reward_of
from schemas.settings import Settings


@pytest.mark.parametrize(
    ("text", "total", "right"),
    [
        ("14", 14, True),
        ("9 + 5 = 14", 14, True),
        ("The answer is 14.", 14, True),
        ("114", 14, False),
        ("141", 14, False),
        ("fourteen", 14, False),
        ("", 2, False),
        ("1 + 1 = 2", 2, True),
    ],
)
def test_the_number_must_stand_as_a_whole_number(text: str, total: int, right: bool) -> None:
    assert is_right(text, total) is right


@pytest.mark.parametrize(
    ("text", "tokens", "ended", "reward"),
    [
        ("14", 1, True, 1.0),
        ("9 + 5 = 14", 9, True, 0.8),
        ("the sum of nine and five is 14", 16, True, 0.625),
        ("14 and then some more words", 16, False, 0.6),
        ("15", 1, True, 0.0),
        ("a logic puzzle", 16, False, 0.0),
    ],
)
def test_rewards(text: str, tokens: int, ended: bool, reward: float) -> None:
    assert tokens <= MAX_NEW_TOKENS
    assert reward_of(text, 14, tokens, ended) == pytest.approx(reward)


def test_the_question_is_the_documented_one() -> None:
    assert question(9, 5) == [
        {"role": "system", "content": "You are a calculator."},
        {"role": "user", "content": "What is 9 + 5? Answer with just the number."},
    ]


def test_every_sum_occurs_once() -> None:
    prompts = dataset(Settings())
    assert len({(p["a"], p["b"]) for p in prompts}) == len(prompts) == 81
