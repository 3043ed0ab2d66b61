"""OpenAI's chat replies, whole and as chunks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.chat_request import ChatRequest
from proxy.generation import Generation
from proxy.reply_sections import split_reply
from proxy.tito import ChatTokenizer
from proxy.tool_calls import parse_tool_calls

_FINISH = {"stop": "stop", "length": "length"}


def final_text(generation: Generation, tokenizer: ChatTokenizer, stops: Sequence[str]) -> str:
    """What the client sees: without the token or the string that ended it."""
    ids = generation.output_ids
    matched = generation.finish.get("matched")
    if isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = tokenizer.decode(ids)
    for stop in stops if isinstance(matched, str) else ():
        # the engine stopped at the first one; text behind it in the same token is cut as well
        at = text.find(stop)
        text = text[:at] if at >= 0 else text
    return text


def assistant_message(
    text: str, tools: Sequence[Any], salt: str, *, thinks: bool = False, inside: bool = False
) -> dict[str, Any]:
    """The message that the client gets, and that it sends back as history."""
    reasoning, text = split_reply(text, thinks=thinks, inside=inside)
    content, calls = parse_tool_calls(text, salt) if tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def finish_reason(generation: Generation, message: dict[str, Any]) -> str:
    """OpenAI's word."""
    if message.get("tool_calls"):
        return "tool_calls"
    return _FINISH.get(str(generation.finish.get("type")), "stop")


def usage(generation: Generation) -> dict[str, Any]:
    """Counts of tokens."""
    prompt, output = len(generation.prompt), len(generation.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def logprob_content(
    generation: Generation, tokenizer: ChatTokenizer, first: int, stop: int
) -> list[dict[str, Any]]:
    """Log-probs of output tokens [first, stop)."""
    ids, logprobs, tops = generation.output_ids, generation.logprobs, generation.top_logprobs
    content = []
    for at in range(first, stop):
        entry = _token(tokenizer, ids[at], logprobs[at])
        alternatives = tops[at] if at < len(tops) and tops[at] else []
        entry["top_logprobs"] = [_token(tokenizer, top[1], top[0]) for top in alternatives]
        content.append(entry)
    return content


def _token(tokenizer: ChatTokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion(
    request: ChatRequest, generation: Generation, tokenizer: ChatTokenizer, message: dict[str, Any], created: int,
    place: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The whole reply."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"refusal": None, **message},
        "finish_reason": finish_reason(generation, message),
        "logprobs": None,
    }
    if request.logprobs:
        tokens = len(generation.output_ids)
        choice["logprobs"] = {"content": logprob_content(generation, tokenizer, 0, tokens), "refusal": None}
    return {
        "id": f"chatcmpl-{generation.rid}",
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "usage": usage(generation),
        "system_fingerprint": generation.spans[-1].version if generation.spans else None,
        "hoofprint": place,
    }


class Chunks:
    """The frames of one streamed reply: all share their head."""

    def __init__(self, request: ChatRequest, created: int, name: str) -> None:
        self._request = request
        self._head = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }

    def delta(
        self, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        """One chunk."""
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        if logprobs:
            choice["logprobs"] = {"content": logprobs, "refusal": None}
        return {**self._head, "choices": [choice]}

    def tool_calls(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The calls, each whole in one chunk."""
        return [
            self.delta({"tool_calls": [{"index": index, **call}]})
            for index, call in enumerate(message.get("tool_calls") or ())
        ]

    def last(
        self, generation: Generation, message: dict[str, Any], place: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Finish, and usage where it was asked for."""
        finish = {**self.delta({}, finish=finish_reason(generation, message)), "hoofprint": place}
        if not self._request.include_usage:
            return [finish]
        return [finish, {**self._head, "choices": [], "usage": usage(generation)}]
