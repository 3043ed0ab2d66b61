"""Where a request belongs inside its session: append, branch or create. Pure: no I/O, no clock.

Native requests are routed by tokens: the parent is the longest recorded step whose whole token sequence is a prefix of
the request's. Chat requests are routed by the conversation: every step is known by the digest chain of its messages.
A parent that is its lineage's newest step is appended to; an older one is branched from; without a parent a new lineage
begins. A retry of a turn that the client never received is therefore a branch at the same prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import orjson

Reason = Literal["first", "branch", "history_rewrite", "tools_changed", "incremental_tokenization_failed"]
Links = dict[bytes, bytes]
"""Digest of a link and a message as it was sent: the next link."""
ID_BYTES = 4


class Step(msgspec.Struct):
    """One recorded segment, seen from routing: it ends at `end` tokens of its lineage."""

    segment_index: int
    lineage: int
    end: int
    chain: bytes = b""
    messages: int = 0
    output: int = 0
    """How many of its last tokens the engine produced."""


class Lineage(msgspec.Struct):
    """Tokens of one lineage as little-endian int32, and its own steps (those of a parent lineage are not repeated)."""

    lineage_id: str
    tokens: bytearray
    steps: list[Step]


class Place(msgspec.Struct, frozen=True):
    """Where a turn goes. `parent` None: a new lineage from nothing. `prefix`: tokens that are already there."""

    parent: Step | None
    prefix: int
    reason: Reason | None


def place_tokens(lineages: Sequence[Lineage], prompt: bytes) -> Place:
    """The longest step that is a prefix of the prompt; the newest of equals."""
    best: Step | None = None
    for lineage in reversed(lineages):
        found = _longest_step(lineage, prompt, longer_than=best.end if best is not None else -1)
        best = best if found is None else found
    if best is not None:
        return Place(best, best.end, None)
    return Place(None, 0, "first" if not lineages else "history_rewrite")


def _longest_step(lineage: Lineage, prompt: bytes, longer_than: int) -> Step | None:
    tokens = memoryview(lineage.tokens)
    try:
        for step in reversed(lineage.steps):
            if step.end <= longer_than:
                return None
            if prompt.startswith(tokens[: step.end * ID_BYTES]):
                return step
        return None
    finally:
        tokens.release()  # a bytearray with a view cannot grow


def place_messages(steps: dict[bytes, Step], chain: Sequence[bytes], known_tools: set[bytes]) -> Place:
    """The longest step whose conversation is a proper prefix of the request's. `chain[i]`: tools and the first i messages."""
    for count in range(len(chain) - 2, 0, -1):
        step = steps.get(chain[count])
        if step is not None and step.messages == count:
            return Place(step, step.end, None)
    if not known_tools:
        return Place(None, 0, "first")
    return Place(None, 0, "history_rewrite" if chain[0] in known_tools else "tools_changed")


def chain_of(tools: object, messages: Iterable[dict[str, Any]], known: Links | None = None) -> list[bytes]:
    """`[digest of the tools, … of the first message too, …]`: len(messages) + 1 entries. `known` spares the messages that an
    earlier request has brought letter for letter: agents send their whole history with every turn."""
    known = {} if known is None else known
    chain = [hashlib.sha256(_canonical(tools or [])).digest()[:16]]
    for message in messages:
        letters = hashlib.sha256(chain[-1] + orjson.dumps(message)).digest()[:16]
        link = known.get(letters)
        if link is None:
            link = known[letters] = next_link(chain[-1], message)
        chain.append(link)
    return chain


def next_link(link: bytes, message: dict[str, Any]) -> bytes:
    """The chain's next entry."""
    return hashlib.sha256(link + _canonical(normalised(message))).digest()[:16]


def request_digest(chain: Sequence[bytes]) -> str:
    """Design §5: digest of the canonical normalised messages and tools."""
    return hashlib.sha256(chain[-1]).hexdigest()


def normalised(message: dict[str, Any]) -> dict[str, Any]:
    """A message as histories are compared: agents send back what they understood, not what was sent to them."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if message.get("role") == "assistant" and isinstance(content, str):
        content = " ".join(content.split())  # white space gets lost on the way; the tokens are ours anyway
    calls = message.get("tool_calls") or []
    result: dict[str, Any] = {"role": message.get("role")}
    if content or not calls:
        result["content"] = content or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        result["reasoning"] = " ".join(reasoning.split())
    if calls:
        result["tool_calls"] = [_normalised_call(call) for call in calls if isinstance(call, dict)]
    if message.get("tool_call_id"):
        result["tool_call_id"] = _letters(str(message["tool_call_id"]))
    if message.get("name"):
        result["name"] = message["name"]
    return result


def _normalised_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = arguments.strip()
    arguments = _numbers(arguments)
    return {"id": _letters(str(call.get("id") or "")), "name": function.get("name"), "arguments": arguments}


def _numbers(value: Any) -> Any:
    """1.0 as 1: JavaScript has one kind of number, and agents send back what it makes of them."""
    if isinstance(value, float) and value.is_integer():
        return int(value) if abs(value) < 2**53 else value
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return value


def _letters(text: str) -> str:
    return "".join(c for c in text if c.isalnum())


def _canonical(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
