"""Rule 1: which version labels are real, and which weights produced which output token.

The label kept is the stripped one, everywhere. An unreal version neither advances the window nor drops anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

UNREAL = frozenset({"", "-1", "unknown", "none"})
UNKNOWN = "unknown"


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Half-open run `[start, stop)` of output tokens that one version produced."""

    version: str
    start: int
    stop: int


def real_version(label: object) -> str | None:
    """The stripped label when it is real, else None. `0`, `default` and `-1.0` are real."""
    return None if label is None else _real_text(label if type(label) is str else str(label))


@lru_cache(maxsize=4096)  # a run has few labels and asks for them with every trajectory
def _real_text(label: str) -> str | None:
    text = label.strip()
    return None if text.casefold() in UNREAL else text


def distinct_real(labels: Iterable[object]) -> list[str]:
    """Real labels in the order in which they were first seen."""
    seen: dict[str, None] = {}
    for label in dict.fromkeys(labels):
        real = real_version(label)
        if real is not None:
            seen.setdefault(real)
    return list(seen)


def spans_of_reply(meta_info: Mapping[str, object], output_tokens: int) -> tuple[list[VersionSpan], bool]:
    """Version spans of one engine reply, best source first, and whether the per-token list had to be given up.

    Sources: `weight_versions` (list of `{version, start, end}` over the output), else `weight_version`, else
    `version`, else unknown. A per-token list that does not cover the output exactly is not trusted: its last label
    is used for all of it, and the second result is True.
    """
    if output_tokens == 0:
        return [], False
    listed = meta_info.get("weight_versions")
    if isinstance(listed, Sequence) and not isinstance(listed, str) and listed:
        spans = [_listed_span(entry) for entry in listed if isinstance(entry, Mapping)]
        whole = [span for span in spans if span.stop > span.start]
        if covers(whole, output_tokens):
            return merge_spans(whole), False
        last = spans[-1].version if spans else UNKNOWN
        return [VersionSpan(last, 0, output_tokens)], True
    scalar = real_version(meta_info.get("weight_version")) or real_version(meta_info.get("version"))
    return [VersionSpan(scalar or UNKNOWN, 0, output_tokens)], False


def _listed_span(entry: Mapping[str, object]) -> VersionSpan:
    """One entry of the per-token list; without usable numbers it is empty, so that the list does not cover."""
    version = real_version(entry.get("version")) or UNKNOWN
    start, end = entry.get("start"), entry.get("end")
    if isinstance(start, int) and isinstance(end, int):
        return VersionSpan(version, start, end)
    return VersionSpan(version, 0, 0)


def covers(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether the spans partition `[0, length)` in order."""
    at = 0
    for span in spans:
        if span.start != at or span.stop < span.start:
            return False
        at = span.stop
    return at == length


def merge_spans(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Neighbouring spans of one version become one; empty spans go."""
    merged: list[VersionSpan] = []
    for span in spans:
        if span.stop <= span.start:
            continue
        if merged and merged[-1].version == span.version and merged[-1].stop == span.start:
            merged[-1] = VersionSpan(span.version, merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged


def append_spans(spans: Sequence[VersionSpan], more: Iterable[VersionSpan], offset: int) -> list[VersionSpan]:
    """Spans of a resumed chunk, which counts from 0, behind the `offset` tokens that are there already."""
    return merge_spans([*spans, *(VersionSpan(s.version, s.start + offset, s.stop + offset) for s in more)])
