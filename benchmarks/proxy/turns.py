"""What a turn costs: CPU of the proxy's process per request, durable log included, and how it grows with the turns."""

from __future__ import annotations

import statistics
from typing import Any, Literal

from benchmarks.proxy.stage import Client, Stage, at_once, client_of

Api = Literal["native", "chat"]
APIS: tuple[Api, ...] = ("native", "chat")
AT_ONCE = 32
QUESTION = "And what does that mean for token number {}? Say it in one sentence, please."


class Talker:
    """One session that asks again and again; each request carries the whole history, as agents send it."""

    def __init__(self, client: Client, base: str, api: Api, reply: int) -> None:
        self._client, self._base, self._api, self._reply = client, base, api, reply
        self._ids: list[int] = list(client.stage.tokens[:64])
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer briefly."}]
        self._turns = 0
        self.tokens = 0
        """What the log has of this session, prompts included."""

    async def turn(self) -> None:
        """One request; its answer becomes history."""
        self._turns += 1
        if self._api == "native":
            body: dict[str, Any] = {
                "input_ids": self._ids,
                "sampling_params": {"max_new_tokens": self._reply},
            }
            answer = await self._client.post(self._base + "/generate", body)
            self.tokens = answer["meta_info"]["prompt_tokens"] + answer["meta_info"]["completion_tokens"]
            self._ids += answer["output_ids"]
            self._ids += self._client.stage.tokens[:24]
        else:
            self._messages.append({"role": "user", "content": QUESTION.format(self._turns)})
            body = {
                "model": "policy", "messages": self._messages, "max_tokens": self._reply, "ignore_eos": True,
            }  # fmt: skip
            answer = await self._client.post(self._base + "/v1/chat/completions", body)
            self.tokens = answer["usage"]["total_tokens"]
            self._messages.append(answer["choices"][0]["message"])

    async def end(self) -> None:
        """Finalize."""
        await self._client.close(self._base)


async def cost(stage: Stage, api: Api, turns: int, reply: int, rounds: int, steps: int = 1) -> list[float]:
    """CPU-ms per request, for each of `steps` equal parts of a conversation of `turns` turns with `reply` tokens each.

    `rounds` times 32 conversations at once, all of them in step; the median round counts, but of single turns, which the
    kernel's clock is too coarse for, the mean.
    """
    seconds: list[list[float]] = [[] for _ in range(steps)]
    async with client_of(stage) as client:
        await _warm_up(client, api, reply)
        for number in range(rounds):
            names = [f"{api}-{turns}-{reply}-{number}-{i}" for i in range(AT_ONCE)]
            talkers = [Talker(client, await client.open(name), api, reply) for name in names]
            for step in range(steps):
                before = stage.cpu()
                for _ in range(turns // steps):
                    await at_once(AT_ONCE, lambda i: talkers[i].turn())  # noqa: B023 - awaited inside the loop
                seconds[step].append(stage.cpu() - before)
            await at_once(AT_ONCE, lambda i: talkers[i].end())  # noqa: B023
    requests = AT_ONCE * (turns // steps)
    middle = statistics.median if turns > 1 else statistics.fmean
    return [middle(spent) / requests * 1000 for spent in seconds]


async def _warm_up(client: Client, api: Api, reply: int) -> None:
    talkers = [
        Talker(client, await client.open(f"{api}-warm-up-{reply}-{i}"), api, reply) for i in range(AT_ONCE)
    ]
    await at_once(AT_ONCE, lambda i: talkers[i].turn())
    await at_once(AT_ONCE, lambda i: talkers[i].end())
