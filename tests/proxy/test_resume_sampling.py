"""What a resumed call asks for, so that its draws are those of one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.resume_sampling import continued, has_grammar, inexact
from stack.engine.sampling import Sampling, adjust

VOCABULARY = 8


def adjusted(asked: dict[str, Any], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits of the next token at the engine, for a call with this output so far."""
    bias = tuple((int(t), v) for t, v in asked.get("logit_bias", {}).items())
    sampling = Sampling(
        frequency_penalty=asked.get("frequency_penalty", 0.0), presence_penalty=asked.get("presence_penalty", 0.0),
        min_new_tokens=asked.get("min_new_tokens", 0), logit_bias=bias,
    )  # fmt: skip
    changed = logits.clone()
    adjust(changed, sampling, output, frozenset({0}))
    return changed


tokens = st.lists(st.integers(1, VOCABULARY - 1), max_size=12)
penalties = st.floats(-2, 2).map(lambda x: round(x, 3))


@settings(deadline=None)
@given(tokens, tokens, penalties, st.integers(0, 20), st.dictionaries(st.integers(0, 7).map(str), penalties))
def test_frequency_penalty_minimum_and_bias_are_those_of_one_call(
    earlier: list[int], new: list[int], frequency: float, minimum: int, bias: dict[str, float]
) -> None:
    asked = {"frequency_penalty": frequency, "min_new_tokens": minimum, "logit_bias": bias}
    logits = torch.linspace(-1, 1, VOCABULARY)
    resumed = adjusted(continued(asked, earlier, 50), new, logits)
    torch.testing.assert_close(resumed, adjusted(asked, earlier + new, logits), atol=1e-5, rtol=0.0)


@settings(deadline=None)
@given(tokens, tokens, penalties, penalties)
def test_presence_penalty_is_exact_until_a_token_comes_again_and_that_is_told(
    earlier: list[int], new: list[int], presence: float, frequency: float
) -> None:
    asked = {"presence_penalty": presence, "frequency_penalty": frequency}
    logits = torch.linspace(-1, 1, VOCABULARY)
    for at in range(len(new)):
        if "presence_penalty" in inexact(asked, earlier, new[: at + 1]):
            return
        resumed = adjusted(continued(asked, earlier, 50), new[:at], logits)
        whole = adjusted(asked, earlier + new[:at], logits)
        torch.testing.assert_close(resumed, whole, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("sampling", "earlier", "new", "fields"),
    [
        ({"presence_penalty": 1.0}, [1, 2], [3, 4], []),
        ({"presence_penalty": 1.0}, [1, 2], [3, 1], []),  # nothing was drawn behind it
        ({"presence_penalty": 1.0}, [1, 2], [1, 3], ["presence_penalty"]),
        ({"repetition_penalty": 1.2}, [1], [2], ["repetition_penalty"]),
        ({"repetition_penalty": 1.2}, [], [2], []),
        ({"repetition_penalty": 1.2}, [1], [], []),
        ({"repetition_penalty": 1.0, "frequency_penalty": 1.0}, [1], [1, 1], []),
        ({"stop_regex": "a+b"}, [1], [2], ["stop_regex"]),
    ],
)
def test_what_did_not_hold_exactly_is_named(
    sampling: dict[str, Any], earlier: list[int], new: list[int], fields: list[str]
) -> None:
    assert inexact(sampling, earlier, new) == fields


def test_a_first_call_asks_for_what_the_client_asked_for() -> None:
    asked = {"temperature": 0.5, "frequency_penalty": 1.0, "logit_bias": {"3": 1}, "min_new_tokens": 4}
    assert continued(asked, [], 9) == {**asked, "max_new_tokens": 9}


def test_grammars_are_known() -> None:
    assert [has_grammar({name: "x"}) for name in ("json_schema", "regex", "ebnf", "structural_tag")] == [
        True
    ] * 4
    assert not has_grammar({"temperature": 1.0, "json_schema": None})
