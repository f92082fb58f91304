"""Offsets as bits: their number of bytes depends on the distance between the first and the last, not on how many there
are. A worker may be sent records of which every other one is refused. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from doll.errors import RecordError

MAX_BITS: Final = 10_000_000  # of one batch, as `data.batch_size`
_BASE_BYTES: Final = 8
_ONES: Final = re.compile("1+")


def num_bytes(first: int, until: int) -> int:
    """The size of the result of `bits_of` for ranges of offsets between these."""
    return _BASE_BYTES + (until - first + 7) // 8


def bits_of(ranges: Sequence[tuple[int, int]]) -> bytes:
    """Ranges [lo, hi) of offsets, at least one, in any order."""
    first, until = min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
    digits = bytearray(b"0") * (until - first)  # the last one is of the first offset
    for lo, hi in ranges:
        digits[until - hi : until - lo] = b"1" * (hi - lo)
    size = num_bytes(first, until) - _BASE_BYTES
    return first.to_bytes(_BASE_BYTES, "little") + int(digits, 2).to_bytes(size, "little")


def ranges_of(data: bytes) -> tuple[tuple[int, int], ...]:
    """The ranges [lo, hi) of offsets of `bits_of`, in their order, as few as possible.

    Raises:
        RecordError: too short, or longer than a batch can be.
    """
    if not _BASE_BYTES < len(data) <= num_bytes(0, MAX_BITS):
        raise RecordError(f"offsets as bits: expected 9 to {num_bytes(0, MAX_BITS)} bytes, got {len(data)}")
    first = int.from_bytes(data[:_BASE_BYTES], "little")
    digits = f"{int.from_bytes(data[_BASE_BYTES:], 'little'):b}"[::-1]
    return tuple((first + run.start(), first + run.end()) for run in _ONES.finditer(digits))


def offsets_of(ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """All offsets of these ranges."""
    return tuple(offset for lo, hi in ranges for offset in range(lo, hi))
