"""Sorted keys as bytes: each as the difference to the one before it, in 7 bits a byte (LEB128). Pure.

The first key is its difference to 0. A byte holds 7 bits, the lowest first; its top bit says that another one follows.
There is one coding of each sequence of keys: a longer one of the same numbers is refused.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError

Keys = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_MORE: Final = 0x80
_BITS: Final = 0x7F
_MAX_BYTES: Final = 10  # of one difference: 64 bits, 7 a byte


def encode_keys(keys: Keys) -> Bytes:
    """The bytes of `keys`, shape (n,), strictly increasing: 1 to 10 for each.

    Raises:
        ValueError: the keys do not increase strictly.
    """
    if not len(keys):
        return np.empty(0, np.uint8)
    rest = np.empty(len(keys), np.uint64)
    rest[0] = keys[0]
    np.subtract(keys[1:], keys[:-1], out=rest[1:])
    if not (keys[1:] > keys[:-1]).all():
        raise ValueError("expected keys that increase strictly: sort them, and add the values of equal ones")
    bits = int(rest.max()).bit_length()
    if bits <= 7:
        return rest.astype(np.uint8)
    lengths = np.ones(len(keys), np.int64)
    for shift in range(7, bits, 7):
        lengths += rest >= np.uint64(1 << shift)
    ends = np.cumsum(lengths)
    data = np.empty(int(ends[-1]), np.uint8)
    at = ends - lengths
    while len(at):
        goes_on = rest > _BITS
        data[at] = (rest & np.uint64(_BITS)).astype(np.uint8) | (goes_on.view(np.uint8) << 7)
        at, rest = at[goes_on] + 1, rest[goes_on] >> np.uint64(7)
    return data


def decode_keys(data: Bytes, *, count: int, limit: int) -> Keys:
    """The `count` keys in `data`, strictly increasing and below `limit`.

    No more memory than a small multiple of `data` is allocated, whatever `count` says.

    Raises:
        BlobError: not the coding of such keys; the message says why.
    """
    if not len(data) and not count:
        return np.empty(0, np.uint64)
    is_last = data < _MORE
    if (coded := int(np.count_nonzero(is_last))) != count or not is_last[-1]:
        raise BlobError(f"expected {count} keys, got {coded} in {len(data)} bytes{_cut_off(is_last)}")
    differences = data.astype(np.uint64) if coded == len(data) else _differences(data, is_last)
    keys: Keys = np.cumsum(differences, dtype=np.uint64)
    if not (keys[1:] > keys[:-1]).all():
        if not differences[1:].all():
            at = int(np.flatnonzero(differences[1:] == 0)[0]) + 1
            raise BlobError(f"expected keys that increase strictly, got {keys[at]} again at {at}: repeated")
        raise BlobError("expected keys that increase strictly, got one below the key before it: unsorted")
    if int(keys[-1]) >= limit:
        raise BlobError(f"expected keys below {limit}, got {keys[-1]}: out of range")
    return keys


def _differences(data: Bytes, is_last: npt.NDArray[np.bool_]) -> Keys:
    ends = np.flatnonzero(is_last)
    begins = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - begins + 1
    longest = int(lengths.max())
    if longest > _MAX_BYTES:
        raise BlobError(f"expected at most {_MAX_BYTES} bytes for a key, got {longest}")
    final = data[ends]
    if ((final == 0) & (lengths > 1)).any():
        raise BlobError("expected the shortest coding of each key, got one that ends with a zero byte")
    if longest == _MAX_BYTES and (final[lengths == _MAX_BYTES] > 1).any():
        raise BlobError("expected keys below 2^64, got a difference above that")
    values: Keys = (data[begins] & _BITS).astype(np.uint64)
    left = np.flatnonzero(lengths > 1)
    for byte in range(1, longest):
        values[left] |= (data[begins[left] + byte] & _BITS).astype(np.uint64) << np.uint64(7 * byte)
        left = left[lengths[left] > byte + 1]
    return values


def _cut_off(is_last: npt.NDArray[np.bool_]) -> str:
    return "" if not len(is_last) or is_last[-1] else ", the last one cut off"
