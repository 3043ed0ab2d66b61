"""Avro's zigzag varints, for the compiled codecs: tables for what is small, and one dictionary for what stands in time stamps.

A time stamp in microseconds is eight bytes, of which the upper five change every two seconds: they are looked up.
Whatever is unusual raises, and the reference implementation decides.
"""

from __future__ import annotations

SMALL = 8192
_MOST = 1024
_LIMIT = 1 << 63
_LOW_BITS = 21
_LOW_MASK = (1 << _LOW_BITS) - 1
_CONTINUED = 0x80 | 0x80 << 7 | 0x80 << 14


class Unusual(ValueError):
    """Not for the compiled codec."""


def _varint(value: int) -> bytes:
    """Of an unsigned number."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


SMALL_NUMBERS = tuple(_varint(number << 1) for number in range(SMALL))
"""The bytes of 0 … SMALL - 1."""
ONE_BYTE = tuple((byte >> 1) ^ -(byte & 1) for byte in range(128))
"""The number that one byte stands for."""
_above: dict[int, bytes] = {}
_above_of: dict[bytes, int] = {}


def number_bytes(value: int) -> bytes:
    """Of any long. Unusual: it is none."""
    if type(value) is not int or not -_LIMIT <= value < _LIMIT:
        raise Unusual("no long")
    raw = (value << 1) ^ (value >> 63)
    if raw <= _LOW_MASK:
        return _varint(raw)
    high = raw >> _LOW_BITS
    upper = _above.get(high)
    if upper is None:
        if len(_above) >= _MOST:
            _above.clear()
        upper = _above[high] = _varint(high)
    return bytes((raw & 127 | 128, raw >> 7 & 127 | 128, raw >> 14 & 127 | 128)) + upper


def number_at(raw: bytes, at: int) -> tuple[int, int]:
    """The long of two bytes and more that begins at `at`, and the place behind it. IndexError: cut off. Unusual: over 64 bits."""
    second = raw[at + 1]
    if second < 128:
        value = raw[at] & 127 | second << 7
        return (value >> 1) ^ -(value & 1), at + 2
    third = raw[at + 2]
    if third < 128:
        value = raw[at] & 127 | (second & 127) << 7 | third << 14
        return (value >> 1) ^ -(value & 1), at + 3
    stop = at + 8
    upper = _above_of.get(raw[at + 3 : stop])
    if upper is not None:
        value = upper + raw[at] + (second << 7) + (third << 14) - _CONTINUED
        return (value >> 1) ^ -(value & 1), stop
    return _number_of_any_size(raw, at)


def _number_of_any_size(raw: bytes, at: int) -> tuple[int, int]:
    start, value, shift = at, 0, 0
    while (byte := raw[at]) & 128:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
    value |= byte << shift
    at += 1
    if value >> 64:
        raise Unusual("longer than a long")
    if at - start == 8:
        if len(_above_of) >= _MOST:
            _above_of.clear()
        _above_of[raw[start + 3 : at]] = value >> _LOW_BITS << _LOW_BITS
    return (value >> 1) ^ -(value & 1), at


def size_at(raw: bytes, at: int) -> tuple[int, int]:
    """A length of two bytes and more: where what it measures starts, and where that ends. Unusual: negative."""
    first, second = raw[at], raw[at + 1]
    if second < 128 and first & 129 == 128:
        at += 2
        return at, at + ((first & 127 | second << 7) >> 1)
    size, at = number_at(raw, at)
    if first & 1:
        raise Unusual("a negative length")
    return at, at + size
