"""Arithmetic: one chat turn, `What is A + B?`, with the openai client that everybody has, pointed at the proxy.

The reward is 0 without the right number in the reply, else 0.6 plus up to 0.4 for brevity if the reply ended by itself.
A reward for the bare number alone would never start: the untrained model does not sample it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from rollout.agent_api import Finish, Task
from rollout.client import failure_of
from rollout.persistence import NO_CONNECTION, CallFailed
from schemas.settings import Settings

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

SYSTEM: Final = "You are a calculator."
MAX_NEW_TOKENS: Final = 16
RIGHT: Final = 0.6
BRIEF: Final = 0.4


def question(a: int, b: int) -> list[dict[str, str]]:
    """The conversation that asks for a + b."""
    user = f"What is {a} + {b}? Answer with just the number."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def is_right(text: str, total: int) -> bool:
    """The number stands in the text as a whole number."""
    return re.search(rf"(?<!\d){total}(?!\d)", text) is not None


def reward_of(text: str, total: int, tokens: int, ended: bool) -> float:
    """`ended`: the reply stopped by itself; then brevity counts."""
    if not is_right(text, total):
        return 0.0
    return RIGHT + (BRIEF * (1 - (tokens - 1) / MAX_NEW_TOKENS) if ended else 0.0)


@cache
def _openai() -> AsyncOpenAI:
    """One client, and so one connection pool, per process. The session decides how often a call is made again."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://unused.invalid", api_key="in-the-url", max_retries=0)


async def agent(task: Task) -> Finish:
    """Ask once and grade the reply."""
    a, b = int(task.prompt["a"]), int(task.prompt["b"])
    reply = await task.session.persist(lambda: _ask(task, a, b))
    choice = reply.choices[0]
    text = choice.message.content or ""
    task.session.received_text(text, (reply.model_extra or {})["hoofprint"])
    tokens = reply.usage.completion_tokens if reply.usage is not None else MAX_NEW_TOKENS
    ended = choice.finish_reason == "stop"
    right = is_right(text, a + b)
    reward = reward_of(text, a + b, tokens, ended)
    return Finish(reward, components={"right": float(right), "ended": float(ended)})


async def _ask(task: Task, a: int, b: int) -> ChatCompletion:
    from openai import APIConnectionError, APIStatusError

    client = _openai().with_options(base_url=f"{task.session.base_url}/v1")
    try:
        reply: ChatCompletion = await client.chat.completions.create(
            model="main",
            messages=question(a, b),  # type: ignore[arg-type]  # plain dicts are what the wire wants
            max_tokens=MAX_NEW_TOKENS,
            temperature=1.0,
        )
    except APIStatusError as wrong:
        raise failure_of(
            wrong.status_code, wrong.response.content, wrong.response.headers.get("Retry-After")
        ) from wrong
    except APIConnectionError as lost:
        raise CallFailed(NO_CONNECTION, "no_connection", str(lost)) from lost
    return reply


def dataset(settings: Settings) -> list[dict[str, Any]]:
    """All sums of two digits from 1 to 9."""
    return [{"a": a, "b": b} for a in range(1, 10) for b in range(1, 10)]
