"""Ids of categories by hashing: no dictionary, and the same id in every process, version and machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import NoneType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.tables.bounds import mixed

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MOST_IDS: Final = 1 << 63
_KINDS: Final = (str, bytes, int, np.integer, NoneType)


def hash_ids(
    *columns: npt.ArrayLike | Sequence[str | bytes | int | None], size: int, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Return the id of each row of categories, 0 to size - 1. Several columns are crossed: an id stands for the
    combination of their values.

    >>> import doll
    >>> doll.hash_ids(["CH", "DE", None], size=1000).tolist()
    [476, 849, 55]
    >>> doll.hash_ids(["CH", "DE"], [3, 7], size=1000).tolist()
    [884, 863]

    Args:
        columns: texts, bytes or integers, each of shape (n,) or (n, k); their shapes must agree. None is a category of
            its own. The number 7 and the text "7" are different categories.
        size: number of ids: of the rows of a table, or 2**63 for ids of a `doll.BoundedEmbedding`.
        seed: another seed gives other ids. Use a seed for each field that shares a table with others.

    Raises:
        TypeError: a value is a float, or of another type.
        OverflowError: an integer has more than 64 bits.
        ValueError: `size` is out of range, or there is no column.
    """
    if not 0 < size <= _MOST_IDS:
        raise ValueError(f"size: expected 1 to 2**63, got {size}")
    if not columns:
        raise ValueError("expected at least one column")
    state = _next_number(np.uint64(seed % (1 << 64)))
    for column in columns:
        state = _next_number(
            state ^ _numbers(column if isinstance(column, np.ndarray) else np.array(column, np.object_))
        )
    ids: npt.NDArray[np.int64] = (state % np.uint64(size)).astype(np.int64)
    return ids


def _numbers(column: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each value."""
    if column.dtype.kind in "biu":
        # A negative integer and a large positive one have the same bits, so the sign counts, too.
        numbers: npt.NDArray[np.uint64] = _next_number(column.astype(np.uint64)) ^ (column < 0).astype(np.uint64)
        return numbers
    values = column.ravel().tolist()
    for kind in set(map(type, values)):
        if not issubclass(kind, _KINDS):
            raise TypeError(f"expected texts, bytes or integers, got a value of type {kind.__name__}")
    bits = {value: _bits(value) for value in dict.fromkeys(values)}  # categories repeat
    return np.fromiter(map(bits.__getitem__, values), np.uint64, len(values)).reshape(column.shape)


def _bits(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, str | bytes):
        text, person = (value.encode(), b"str") if isinstance(value, str) else (value, b"bytes")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=person).digest(), "little")
    return int(_numbers(np.array([value], np.uint64 if value >= 0 else np.int64))[0])


def _next_number(state: Any) -> Any:
    """Return the next number of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)
    for each state."""
    with np.errstate(over="ignore"):
        return mixed(state + _GOLDEN)
