"""What agents and SDKs send as a matter of course, nulls and empty lists with it: none of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.chat_request import parse_chat
from proxy.messages_request import parse_messages
from proxy.responses_request import parse_responses

HI: dict[str, Any] = {"role": "user", "content": "hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}}
NO_TEXT = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
CHAT: list[dict[str, Any]] = [
    dict.fromkeys(
        ("stop", "tools", "tool_choice", "response_format", "logit_bias", "functions", "function_call", "user", "seed", "n",
         "stream", "stream_options", "logprobs", "top_logprobs", "metadata", "store", "modalities", "audio",
         "parallel_tool_calls", "reasoning_effort", "service_tier", "prediction", "web_search_options")
    ),
    {"stop": [], "tools": [], "functions": [], "logit_bias": {}, "metadata": {}, "chat_template_kwargs": {}},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"store": True, "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low", "reasoning_effort": "none"},
    {"n": 1, "logprobs": False, "top_logprobs": 0, "temperature": 0, "presence_penalty": 0, "modalities": ["text"]},
    {"parallel_tool_calls": True, "max_completion_tokens": 9, "response_format": {"type": "text"}},
    {"tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}, **CACHED}], "tool_choice": "auto"},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x", **CACHED}]}, HI]},
    {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [CALL], **NO_TEXT},
                  {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": [{"type": "text", "text": "r"}]}]},
    {"messages": [HI, {"role": "assistant", "content": "x", "tool_calls": None, **NO_TEXT}, HI]},
    {"messages": [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []}, HI]},
    {"messages": [HI, {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_details": [{"text": "r"}]}, HI]},
    {"messages": [HI, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": None}]},
]  # fmt: skip
FUNCTION = {
    "type": "function",
    "name": "f",
    "description": None,
    "parameters": {"type": "object"},
    "strict": True,
}
RESPONSES: list[dict[str, Any]] = [
    dict.fromkeys(
        ("instructions", "metadata", "previous_response_id", "reasoning", "text", "tool_choice", "tools", "top_p", "include",
         "background", "max_tool_calls", "conversation", "prompt", "temperature", "truncation", "user", "stream")
    ),
    {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False},
    {"text": {"format": {"type": "text"}, "verbosity": None}, "service_tier": "auto", "stream_options": {}},
    {"parallel_tool_calls": False, "truncation": "disabled", "background": False, "client_metadata": {"a": "b"}},
    {"tools": [FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "p", "format": {"type": "grammar"}}]},
    {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]}], "tool_choice": "auto"},
    {"input": [HI, {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": None},
               {"type": "message", "id": "m", "role": "assistant", "status": "completed", "phase": None,
                "content": [{"type": "output_text", "text": "y", "annotations": [], "logprobs": []}]}, HI]},
    {"input": [HI, {"type": "function_call", "id": "c", "call_id": "c", "name": "f", "arguments": "", "status": None},
               {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]}]},
]  # fmt: skip
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}}
MESSAGES: list[dict[str, Any]] = [
    dict.fromkeys(
        ("system", "metadata", "stop_sequences", "thinking", "tools", "tool_choice", "output_config", "mcp_servers",
         "container", "context_management", "temperature", "stream")
    ),
    {"system": [], "stop_sequences": [], "tools": [], "mcp_servers": [], "output_config": {}, "betas": ["x"]},
    {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}], **CACHED},
    {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "context_management": {}},
    {"thinking": {"type": "disabled"}, "service_tier": "auto", "top_k": 5, "tool_choice": {"type": "auto"}},
    {"tools": [{**TOOL, **CACHED, "type": "custom", "strict": True, "defer_loading": False}],
     "tool_choice": {"type": "auto", "name": None, "disable_parallel_tool_use": True}},
    {"messages": [HI, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "x", "citations": None}, USE]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "is_error": None, **CACHED}, {"type": "text", "text": "y"}]}]},
    {"messages": [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]}]}]},
]  # fmt: skip


@pytest.mark.parametrize("body", CHAT)
def test_chat(body: dict[str, Any]) -> None:
    assert parse_chat({"messages": [HI], **body}, 1.0).messages


@pytest.mark.parametrize("body", RESPONSES)
def test_responses(body: dict[str, Any]) -> None:
    assert parse_responses({"input": "hi", **body}, 1.0).chat.messages


@pytest.mark.parametrize("body", MESSAGES)
def test_messages(body: dict[str, Any]) -> None:
    assert parse_messages({"max_tokens": 9, "messages": [HI], **body}, 1.0).messages
