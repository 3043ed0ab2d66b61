"""Keys and values of finished requests, so that the next turn of a session computes only what is new.

An entry is the exact token sequence that a request had in the cache when it ended; its prompt is a second
name of the same entry, for further samples of that prompt. A lookup takes the longest stored sequence that
the new prompt starts with. Invariant: everything in here was computed by the current weights; a change of
weights empties it, and a request that saw a change is never stored (see `Scheduler`). Least recently used
entries leave when the byte budget is reached.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass

from torch import Tensor

_ID_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    names: tuple[bytes, ...]
    keys_values: Tensor


def name_of(tokens: list[int]) -> bytes:
    """A sequence as a dictionary key; a shorter sequence's name is a prefix of it."""
    return array("i", tokens).tobytes()


class Prefixes:
    """At most `budget_bytes` of keys and values; 0 turns it off."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._used = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._by_name: dict[bytes, _Entry] = {}
        self._lengths: Counter[int] = Counter()

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    def clear(self) -> None:
        """Forget everything: the weights have changed, or somebody asked for it."""
        self._used = 0
        self._entries.clear()
        self._by_name.clear()
        self._lengths.clear()

    def find(self, tokens: list[int]) -> Tensor | None:
        """Longest stored beginning, (layers, 2, kv_heads, n, head_dim), n < len(tokens): one is computed."""
        name = name_of(tokens) if self._entries else b""
        for length in sorted(self._lengths, reverse=True) if name else ():
            entry = self._by_name.get(name[: length * _ID_BYTES]) if length <= len(tokens) else None
            if entry is not None:
                self._entries.move_to_end(entry.names[0])
                usable = min(length, len(tokens) - 1)
                return entry.keys_values[:, :, :, :usable] if usable else None
        return None

    def keep(self, tokens: list[int], prompt_length: int, keys_values: Tensor) -> None:
        """Store a finished request: `tokens` are the sequence whose keys and values these are."""
        whole = name_of(tokens)
        size = keys_values.nbytes
        if size > self._budget or whole in self._entries:
            return
        prompt = whole[: prompt_length * _ID_BYTES]
        names = (whole,) if prompt == whole or prompt in self._by_name else (whole, prompt)
        entry = _Entry(names, keys_values)
        self._entries[whole] = entry
        for name in names:
            self._by_name.setdefault(name, entry)
            self._lengths[len(name) // _ID_BYTES] += 1
        self._used += size
        while self._used > self._budget:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._used -= entry.keys_values.nbytes
        for name in entry.names:
            if self._by_name.get(name) is entry:
                del self._by_name[name]
            length = len(name) // _ID_BYTES
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
