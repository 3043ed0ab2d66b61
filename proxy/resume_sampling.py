"""Sampling parameters of a call that goes on behind the output of earlier calls, and what of them cannot go on exactly.

An engine counts its penalties over what the call itself produces, and the earlier output is prompt to it. Additive penalties
are a logit bias, which is added behind the penalties and before the temperature, so they are handed on as one: exactly for the
frequency penalty, and for the presence penalty until a token comes again, which is then penalised twice. A repetition penalty
scales logits and cannot be handed on, nor can the state of a grammar or of a regular expression for the end. Seeds need
nothing: engines hash them with the position in the whole context. (SGLang 0.5.23: `sampling_batch_info.py`,
`penaltylib/`, `sampler.py`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "choice")


def continued(sampling: Mapping[str, Any], earlier: Sequence[int], left: int) -> dict[str, Any]:
    """What the engine gets: `earlier` output is there already, `left` tokens may come."""
    asked = {**sampling, "max_new_tokens": left}
    if not earlier:
        return asked
    if sampling.get("min_new_tokens"):
        asked["min_new_tokens"] = max(0, sampling["min_new_tokens"] - len(earlier))
    bias = _bias(sampling, earlier)
    if bias:
        given = {str(token): float(value) for token, value in (sampling.get("logit_bias") or {}).items()}
        asked["logit_bias"] = {
            token: given.get(token, 0.0) + bias.get(token, 0.0) for token in given.keys() | bias
        }
    return asked


def _bias(sampling: Mapping[str, Any], earlier: Sequence[int]) -> dict[str, float]:
    frequency = float(sampling.get("frequency_penalty") or 0.0)
    presence = float(sampling.get("presence_penalty") or 0.0)
    if not frequency and not presence:
        return {}
    return {str(token): -(frequency * count + presence) for token, count in Counter(earlier).items()}


def has_grammar(sampling: Mapping[str, Any]) -> bool:
    """Whether output must follow a grammar, which an engine begins anew with every call."""
    return any(sampling.get(name) for name in _GRAMMARS)


def inexact(sampling: Mapping[str, Any], earlier: Sequence[int], new: Sequence[int]) -> list[str]:
    """Fields that did not hold exactly for `new` tokens behind `earlier` ones."""
    if not earlier or not new:
        return []
    found = []
    if sampling.get("repetition_penalty") not in (None, 1, 1.0):
        found.append("repetition_penalty")
    if sampling.get("presence_penalty") and not set(earlier).isdisjoint(new[:-1]):
        found.append("presence_penalty")
    if sampling.get("stop_regex"):
        found.append("stop_regex")
    return found
