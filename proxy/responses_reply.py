"""OpenAI's Responses: the items of an answer, the whole response, the events of its stream. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.chat_reply import logprob_content
from proxy.conversation import Piece, Talk
from proxy.messages_reply import event_of
from proxy.reply_sections import Part
from proxy.responses_request import ARGUMENT, ResponsesRequest, opaque

Item = dict[str, Any]


def usage(talk: Talk) -> dict[str, Any]:
    """Counts of tokens."""
    generation = talk.generation
    prompt, output = len(generation.prompt), len(generation.output_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


def reasoning_item(talk: Talk, text: str, *, encrypted: bool) -> Item:
    """Reasoning, readable; and opaque for those who asked, because not every client sends the readable form back."""
    item: Item = {
        "type": "reasoning",
        "id": f"rs_{talk.name}",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": "completed",
    }
    return {**item, "encrypted_content": opaque(text)} if encrypted else item


def message_item(talk: Talk, text: str, logprobs: list[Any], status: str) -> Item:
    """Text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "type": "message",
        "id": f"msg_{talk.name}",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def call_items(talk: Talk, request: ResponsesRequest) -> list[Item]:
    """The calls; those of free-text tools in their own form."""
    items = []
    for index, call in enumerate(talk.message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item: Item = {"call_id": call["id"], "name": name, "status": "completed"}
        if name in request.custom:
            item |= {
                "type": "custom_tool_call",
                "id": f"ctc_{talk.name}_{index}",
                "input": _free_text(arguments),
            }
        else:
            item |= {"type": "function_call", "id": f"fc_{talk.name}_{index}", "arguments": arguments}
        if name in request.namespaces:
            item["namespace"] = request.namespaces[name]
        items.append(item)
    return items


def _free_text(arguments: str) -> str:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return str(value[ARGUMENT]) if isinstance(value, dict) and ARGUMENT in value else arguments


def response(talk: Talk, status: str, output: list[Item]) -> dict[str, Any]:
    """The response object."""
    chat = talk.request
    return {
        "id": f"resp_{talk.name}",
        "object": "response",
        "created_at": talk.created,
        "status": status,
        "model": chat.model,
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": chat.sampling.get("temperature"),
        "top_p": chat.sampling.get("top_p"),
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def status_of(talk: Talk) -> str:
    """Cut by the budget: incomplete."""
    cut = talk.generation.finish.get("type") == "length" and not talk.message.get("tool_calls")
    return "incomplete" if cut else "completed"


def output_of(talk: Talk, request: ResponsesRequest) -> list[Item]:
    """The items of the answer, in the order in which they are streamed."""
    message = talk.message
    reasoning, text, calls = message.get("reasoning_content"), message["content"], call_items(talk, request)
    items = [reasoning_item(talk, reasoning, encrypted=request.encrypted)] if reasoning else []
    if text or not calls:
        logprobs: list[Any] = []
        if talk.request.logprobs:
            count = len(talk.generation.output_ids)
            logprobs = logprob_content(talk.generation, talk.tokenizer, 0, count)
        items.append(message_item(talk, text or "", logprobs, status_of(talk)))
    return items + calls


def whole(talk: Talk, request: ResponsesRequest, place: dict[str, Any]) -> dict[str, Any]:
    """The finished response."""
    status = status_of(talk)
    done = response(talk, status, output_of(talk, request))
    if status == "incomplete":
        done["incomplete_details"] = {"reason": "max_output_tokens"}
    return {**done, "usage": usage(talk), "hoofprint": place}


class Events:
    """The events of one streamed response, numbered. Agents act on finished items, so these wait for the record."""

    def __init__(self, talk: Talk, request: ResponsesRequest) -> None:
        self._talk = talk
        self._request = request
        self._number = -1
        self._index = -1
        self._open: dict[Part, int] = {}

    def start(self) -> bytes:
        """The response begins."""
        begun = response(self._talk, "in_progress", [])
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def piece(self, piece: Piece) -> bytes:
        """More of a part; its item is opened with its first piece."""
        part: Part = "reasoning" if piece.kind == "reasoning" else "content"
        frames = self._opened(part)
        at = self._place(part)
        if part == "reasoning":
            return frames + self._event("response.reasoning_text.delta", **at, delta=piece.text)
        logprobs: list[Any] = []
        if self._talk.request.logprobs:
            logprobs = logprob_content(self._talk.generation, self._talk.tokenizer, piece.first, piece.stop)
        return frames + self._event("response.output_text.delta", **at, delta=piece.text, logprobs=logprobs)

    def end(self, place: dict[str, Any]) -> bytes:
        """Finished items and the response."""
        done = whole(self._talk, self._request, place)
        frames = []
        for item in done["output"]:
            match item["type"]:
                case "reasoning":
                    frames.append(self._close("reasoning", item))
                case "message":
                    frames.append(self._close("content", item))
                case _:
                    frames.append(self._call(item))
        frames.append(self._event(f"response.{done['status']}", response=done))
        return b"".join(frames)

    def error(self, body: dict[str, Any]) -> bytes:
        """The last frame of a stream that broke."""
        error = body["error"]
        failed = {
            **response(self._talk, "failed", []),
            "error": {"code": error["code"], "message": error["message"]},
        }
        return self._event("response.failed", response=failed, error=error)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event_of({"type": kind, "sequence_number": self._number, **fields})

    def _place(self, part: Part) -> dict[str, Any]:
        prefix = "rs" if part == "reasoning" else "msg"
        return {
            "item_id": f"{prefix}_{self._talk.name}",
            "output_index": self._open[part],
            "content_index": 0,
        }

    def _opened(self, part: Part) -> bytes:
        if part in self._open:
            return b""
        self._index += 1
        self._open[part] = self._index
        if part == "reasoning":
            item = {
                **reasoning_item(self._talk, "", encrypted=False),
                "content": [],
                "status": "in_progress",
            }
            empty: Item = {"type": "reasoning_text", "text": ""}
        else:
            item = {**message_item(self._talk, "", [], "in_progress"), "content": []}
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return added + self._event("response.content_part.added", **self._place(part), part=empty)

    def _close(self, part: Part, item: Item) -> bytes:
        frames = self._opened(part)
        at, content = self._place(part), item["content"][0]
        if part == "reasoning":
            frames += self._event("response.reasoning_text.done", **at, text=content["text"])
        else:
            frames += self._event(
                "response.output_text.done", **at, text=content["text"], logprobs=content["logprobs"]
            )
        frames += self._event("response.content_part.done", **at, part=content)
        return frames + self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _call(self, item: Item) -> bytes:
        self._index += 1
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        at = {"item_id": item["id"], "output_index": self._index}
        begun = {**item, field: "", "status": "in_progress"}
        frames = self._event("response.output_item.added", output_index=self._index, item=begun)
        frames += self._event(f"response.{kind}.delta", **at, delta=item[field])
        more = {} if field == "input" else {"name": item["name"]}
        frames += self._event(f"response.{kind}.done", **at, **{field: item[field]}, **more)
        return frames + self._event("response.output_item.done", output_index=self._index, item=item)
