"""Dial: turn a ring of ten digits forward, one digit a token, over six turns, without knowing when the turn ends.

Each turn the environment appends three tokens: feedback on the last turn, `u`, and the digit on the dial. The agent says
digits; a token is right when it is the successor of the digit right before it (for the first one: the digit shown).
Nothing but digits and `;` means anything; `;` ends the turn. The environment takes the dial back after n tokens, n from
6 to 14, unknown to the policy (the request's budget). A turn scores right tokens / n, the reward is the mean of the
turns. The dial stays at the last digit said, so that what is shown later depends on what was said. There is no penalty:
one would make silence the best first move. All samples of a group see the same start and the same n.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollout.agent_api import Finish, Task
from schemas.settings import Settings

ALPHABET: Final = "0123456789udlr+-=:;,.?! \n"
"""The 25 tokens by id. Only digits, `u`, `;` and the feedback signs `=`, `+`, `-` occur in this task."""
ID: Final[Mapping[str, int]] = {sign: i for i, sign in enumerate(ALPHABET)}
DIGITS: Final = 10
TURNS: Final = 6
SHORTEST: Final = 6
LONGEST: Final = 14
PROMPTS: Final = 4096
SEMICOLON: Final = ID[";"]


class Dial:
    """The environment of one trajectory."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"dial {seed}")
        self.position = rng.randrange(DIGITS)
        self.budgets = [rng.randint(SHORTEST, LONGEST) for _ in range(TURNS)]
        self.scores: list[float] = []

    @property
    def done(self) -> bool:
        """All turns are played."""
        return len(self.scores) == TURNS

    @property
    def budget(self) -> int:
        """Tokens until the environment takes the dial back."""
        return self.budgets[len(self.scores)]

    def observe(self) -> list[int]:
        """Feedback (`=` first, `+` for at least half right, else `-`), `u`, the digit shown."""
        sign = "=" if not self.scores else "+" if self.scores[-1] >= 0.5 else "-"
        return [ID[sign], ID["u"], self.position]

    def act(self, said: Sequence[int]) -> float:
        """Play one turn; the share of right tokens."""
        right, before = 0, self.position
        for token in said[: self.budget]:
            if token == SEMICOLON:
                break
            if before < DIGITS and token == (before + 1) % DIGITS:
                right += 1
            if token < DIGITS:
                self.position = token
            before = token
        score = right / self.budget
        self.scores.append(score)
        return score

    @property
    def reward(self) -> float:
        """Mean score of the turns."""
        return sum(self.scores) / TURNS


async def agent(task: Task) -> Finish:
    """Play one trajectory through the native token API: every token goes back exactly as it came."""
    dial = Dial(int(task.prompt["seed"]))
    context: list[int] = []
    while not dial.done:
        context += dial.observe()
        params = {"max_new_tokens": dial.budget, "temperature": 1.0, "stop_token_ids": [SEMICOLON]}
        answer = await task.session.generate(context, params)
        context += answer.output_ids
        dial.act(answer.output_ids)
    perfect = sum(score == 1.0 for score in dial.scores) / TURNS
    return Finish(dial.reward, components={"perfect_turns": perfect})


def dataset(settings: Settings) -> list[dict[str, Any]]:
    """Seeds of the run; different for each run seed."""
    return [{"seed": settings.run.seed * PROMPTS + n} for n in range(PROMPTS)]
