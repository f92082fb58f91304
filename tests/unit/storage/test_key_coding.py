"""Keys: what is encoded comes back; anything that is not the coding of sorted keys is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from doll.errors import BlobError
from doll.storage.sections import decode_keys, encode_keys
from hypothesis import given
from hypothesis import strategies as st

TOP = 2**64
keys_ = st.sets(st.integers(0, TOP - 1) | st.integers(0, 300) | st.sampled_from([2**n for n in range(64)]))


def leb128(number: int) -> bytes:
    """The reference: one number at a time."""
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def decode(data: bytes, count: int, limit: int = TOP) -> list[int]:
    return decode_keys(np.frombuffer(data, np.uint8), count=count, limit=limit).tolist()


@given(keys_)
def test_comes_back_in_the_bytes_of_the_reference(numbers: set[int]) -> None:
    keys = sorted(numbers)
    data = encode_keys(np.array(keys, np.uint64)).tobytes()
    assert data == b"".join(leb128(key - before) for before, key in zip([0, *keys], keys, strict=False))
    assert decode(data, len(keys)) == keys
    if keys:
        with pytest.raises(BlobError, match="out of range"):
            decode(data, len(keys), limit=keys[-1])


@given(st.binary(max_size=40), st.integers(0, 2**62))
def test_any_bytes_are_refused_or_the_only_coding_of_their_keys(data: bytes, count: int) -> None:
    for number in (count, sum(byte < 128 for byte in data)):
        try:
            keys = decode(data, number)
        except BlobError:
            continue
        assert keys == sorted(set(keys))
        assert encode_keys(np.array(keys, np.uint64)).tobytes() == data


@given(keys_.filter(bool))
def test_every_truncation_is_refused(numbers: set[int]) -> None:
    data = encode_keys(np.array(sorted(numbers), np.uint64)).tobytes()
    for end in range(len(data)):
        with pytest.raises(BlobError):
            decode(data[:end], len(numbers))
    with pytest.raises(BlobError):
        decode(data + b"\0", len(numbers))


@pytest.mark.parametrize(
    ("data", "count", "says"),
    [
        (b"\x05\x00", 2, "got 5 again at 1: repeated"),
        (b"\x05" + leb128(TOP - 1), 2, "got one below the key before it: unsorted"),
        (b"\x05\x01", 1, "expected 1 keys, got 2 in 2 bytes"),
        (b"\x05", 10**18, "expected 1000000000000000000 keys, got 1 in 1 bytes"),
        (b"", 1, "expected 1 keys, got 0 in 0 bytes"),
        (b"\x05\x81", 1, "the last one cut off"),
        (b"\x85\x00", 1, "shortest coding"),
        (b"\xff" * 9 + b"\x02", 1, "below 2\\^64"),
        (b"\xff" * 10 + b"\x01", 1, "at most 10 bytes for a key, got 11"),
    ],
)
def test_says_what_is_wrong(data: bytes, count: int, says: str) -> None:
    with pytest.raises(BlobError, match=says):
        decode(data, count)


@pytest.mark.parametrize("keys", [[1, 1], [2, 1], [0, 5, 5], [TOP - 1, 0]])
def test_does_not_encode_what_it_would_refuse(keys: list[int]) -> None:
    with pytest.raises(ValueError, match="increase strictly"):
        encode_keys(np.array(keys, np.uint64))
