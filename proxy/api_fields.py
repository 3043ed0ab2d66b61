"""The fields of every API's body: what is honoured, within which bounds, and what is refused by name.

One table per route. It checks bodies (`Record.check`), says which names are advice (`Record.unknown`), and is what
`openapi.py` documents. Bounds of sampling are SGLang's own, so that a value an engine would refuse is refused by its
name here. Conversations and token ids are read by their parsers, because these must look at every item anyway.
"""

from __future__ import annotations

from proxy.fields import (
    ANYTHING,
    FLAG,
    OBJECT,
    TEXT,
    Either,
    Kind,
    ListOf,
    MapOf,
    Record,
    Refused,
    choice,
    filled,
    number,
    read_elsewhere,
    text,
    whole,
)

_INT32 = 2**31 - 1
NUMBER = number()
NAME = text(1, 256)
_MAYBE_NAME = text(0, 256)
"""Empty is absent, as an empty header is."""
_FILLED = filled(4096)
_COUNT = whole(0, _INT32)
_TOKENS = whole(1, _INT32)
_ONE = Kind("1: send one request per sample", {"const": 1}, lambda value: type(value) is int and value == 1)
_STOP = Either(filled(1024), ListOf(filled(1024), most=16), says="a string or a list of at most 16 strings")
_STOP_IDS = ListOf(_COUNT, most=64)
_SECONDS = number(0, 3600)
_COMPONENTS = MapOf(NUMBER, "an object of names and numbers")

END = Record(
    {
        "status": choice("completed", "truncated", "failed"),
        "reason": TEXT,
        "reward": NUMBER,
        "reward_pending": FLAG,
        "components": _COMPONENTS,
        "detail": TEXT,
    }
)
_SESSION = {"session_id": _MAYBE_NAME, "instance_id": _MAYBE_NAME}
_CALL = {**_SESSION, "turn_id": _MAYBE_NAME, "stream": FLAG, "final": FLAG, "end": END}

_MOST_SAMPLED: dict[str, Kind] = {
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "top_k": whole(-1, _INT32, but=0),
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0, 2, above=True),
    "stop_token_ids": _STOP_IDS,
    "ignore_eos": FLAG,
    "n": _ONE,
}
_SEED = whole(-(2**63), 2**63 - 1)

NATIVE = Record(
    {
        **_CALL,
        "input_ids": read_elsewhere(ListOf(_COUNT, 1).schema or {}),
        "sampling_params": Record(
            {
                **_MOST_SAMPLED,
                "max_new_tokens": _TOKENS,
                "min_new_tokens": _COUNT,
                "sampling_seed": _SEED,
                "stop": _STOP,
                "stop_regex": Either(TEXT, ListOf(TEXT)),
                "logit_bias": MapOf(NUMBER, "an object of token ids and numbers"),
                **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), TEXT),
                **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), FLAG),
            }
        ),
        "return_logprob": FLAG,
        "top_logprobs_num": whole(0, 64),
        "rid": _MAYBE_NAME,
        **dict.fromkeys(
            ("text", "input_embeds", "image_data", "audio_data", "video_data", "return_hidden_states",
             "return_routed_experts", "token_ids_logprob", "lora_path", "custom_logit_processor", "session_params"),
            Refused("is not supported here; send input_ids"),
        ),
    },
)  # fmt: skip
_TEMPLATE_OWN = (
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "add_special_tokens",
)  # fmt: skip
_TEMPLATE = Record(
    dict.fromkeys(
        _TEMPLATE_OWN,
        Kind("left out: it belongs to the rendering itself, not to the template", None, lambda _: False),
    )
)
_SAMPLED = {
    **_CALL,
    **_MOST_SAMPLED,
    "model": TEXT,
    "min_tokens": _COUNT,
    "seed": _SEED,
    "logit_bias": Refused(),
    "chat_template_kwargs": _TEMPLATE,
}


def _functions(kind: str, name: str, parameters: str) -> dict[str, Kind]:
    return {"type": choice(kind), name: filled(256), "description": TEXT, parameters: OBJECT}


_STRUCTURE = {"name": TEXT, "description": TEXT, "schema": OBJECT, "strict": FLAG}
_FORMATS = choice("text", "json_object", "json_schema")
_OPENAI = {
    **_SAMPLED,
    "max_tokens": _TOKENS,
    "stop": _STOP,
    "stream_options": Record({"include_usage": FLAG}),
    "response_format": Record({"type": _FORMATS, "json_schema": Record(_STRUCTURE)}, ("type",)),
}


def _messages(*roles: str) -> Kind:
    said = Record({"role": choice(*roles), "content": TEXT}, ("role", "content"))
    return read_elsewhere(ListOf(said, 1).schema or {})


CHAT = Record(
    {
        **_OPENAI,
        "messages": _messages("system", "developer", "user", "assistant"),
        "max_completion_tokens": _TOKENS,
        "logprobs": FLAG,
        "top_logprobs": whole(0, 20),
        "modalities": ListOf(choice("text")),
        "tools": ListOf(
            Record(
                {
                    "type": choice("function"),
                    "function": Record(
                        {"name": filled(256), "description": TEXT, "parameters": OBJECT, "strict": FLAG}, ("name",)
                    ),
                },
                ("function",),
            )
        ),
        "tool_choice": Either(choice("none", "auto", "required"), OBJECT),
        "parallel_tool_calls": FLAG,
        **dict.fromkeys(
            ("functions", "function_call", "audio", "web_search_options", "prompt_logprobs"), Refused()
        ),
        "best_of": _ONE,
    },
    ("messages",),
    advice=("modalities",),
)  # fmt: skip
COMPLETIONS = Record(
    {
        **{name: kind for name, kind in _OPENAI.items() if name != "chat_template_kwargs"},
        "prompt": read_elsewhere({"type": "string", "minLength": 1}),
        "logprobs": whole(0, 20),
        "best_of": _ONE,
        **dict.fromkeys(("echo", "suffix", "tools", "messages"), Refused()),
    },
    ("prompt",),
)
RESPONSES = Record(
    {
        **_SAMPLED,
        "input": read_elsewhere({"type": "string"}),
        "instructions": TEXT,
        "max_output_tokens": _TOKENS,
        "stop": _STOP,
        "text": Record({"format": Record({"type": _FORMATS, **_STRUCTURE}, ("type",)), "verbosity": TEXT}),
        "include": ListOf(TEXT),
        "top_logprobs": whole(0, 20),
        "tools": ListOf(Record({"type": TEXT, "name": TEXT, "description": TEXT, "parameters": OBJECT}, ("type",))),
        "tool_choice": Either(choice("none", "auto", "required"), OBJECT),
        "parallel_tool_calls": FLAG,
        "reasoning": OBJECT,
        **dict.fromkeys(
            ("previous_response_id", "conversation", "background", "prompt", "max_tool_calls"),
            Refused("cannot be honoured: send the whole input"),
        ),
    },
    ("input",),
    advice=("reasoning",),
)  # fmt: skip
MESSAGES = Record(
    {
        **_SAMPLED,
        "messages": _messages("user", "assistant"),
        "system": read_elsewhere({"type": "string"}),
        "max_tokens": _TOKENS,
        "stop_sequences": ListOf(filled(1024), most=16),
        "thinking": Record({"type": TEXT, "budget_tokens": _COUNT}, ("type",)),
        "output_config": Record({"format": Record({"type": TEXT, "schema": OBJECT}, ("schema",)), "effort": TEXT}),
        "tools": ListOf(
            Record({"type": TEXT, "name": filled(256), "description": TEXT, "input_schema": OBJECT}, ("name",))
        ),
        "tool_choice": Record(
            {"type": choice("auto", "any", "tool", "none"), "name": TEXT, "disable_parallel_tool_use": FLAG}, ("type",)
        ),
        "mcp_servers": Refused(),
    },
    ("messages", "max_tokens"),
)  # fmt: skip
COUNT_TOKENS = Record(MESSAGES.fields, ("messages",))

OPEN_SESSION = Record(
    {
        "kind": choice("train", "eval", "free"),
        "group_id": NAME,
        "attempt": _COUNT,
        "sample_index": _COUNT,
        "session_id": NAME,
        "instance_id": NAME,
        "attributes": ANYTHING,
        "restart": FLAG,
    }
)
FINALIZE = Record({**END.fields, **_SESSION})
DISCARD = Record(_SESSION)
REWARD = Record({**_SESSION, "reward": NUMBER, "components": _COMPONENTS, "source": _MAYBE_NAME}, ("reward",))
_LABEL = text(1, 200)
VERSIONS = Record(
    {
        "version": _LABEL,
        "checkpoint_uri": text(1, 4096),
        "step": whole(0, 2**63 - 1),
        "force": FLAG,
    },
    ("version", "checkpoint_uri"),
)
PAUSE = Record(
    {"reason": TEXT, "mode": choice("abort", "drain"), "timeout_seconds": _SECONDS, "session_id": NAME}
)
RESUME = Record({"version": _LABEL, "reason": TEXT, "session_id": NAME})
DRAIN = Record({"timeout_seconds": _SECONDS, "force": FLAG})

BODIES: dict[str, Record] = {
    "/generate": NATIVE,
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/session/finalize": FINALIZE,
    "/session/discard": DISCARD,
    "/session/reward": REWARD,
    "/sessions": OPEN_SESSION,
    "/v1/policy/versions": VERSIONS,
    "/v1/rollout/pause": PAUSE,
    "/v1/rollout/resume": RESUME,
    "/v1/engines/{engine_id}/drain": DRAIN,
}
"""By route, without the session's token."""

# -- parts of conversations ------------------------------------------------------------------------

CHAT_MESSAGE = Record(
    {
        "name": TEXT,
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": ListOf(
            Record(
                {
                    "id": TEXT,
                    "type": choice("function"),
                    "function": Record({"name": filled(256), "arguments": Either(TEXT, OBJECT)}, ("name",)),
                },
                ("function",),
            )
        ),
    }
)
RESPONSES_ITEMS: dict[str, Record] = {
    "function_call": Record(
        {"name": filled(256), "call_id": TEXT, "arguments": Either(TEXT, OBJECT)}, ("name",)
    ),
    "custom_tool_call": Record({"name": filled(256), "call_id": TEXT, "input": TEXT}, ("name",)),
    "function_call_output": Record({"call_id": TEXT}),
    "custom_tool_call_output": Record({"call_id": TEXT}),
    "reasoning": Record({"content": ListOf(Record({"text": TEXT})), "encrypted_content": TEXT}),
}
MESSAGES_BLOCKS: dict[str, Record] = {
    "thinking": Record({"thinking": TEXT}),
    "tool_use": Record({"name": filled(256), "id": TEXT, "input": OBJECT}, ("name",)),
    "tool_result": Record({"tool_use_id": TEXT, "is_error": FLAG}),
}
