"""Packed records: what is packed comes out, in order; every other sequence of bytes is a `SampleError`."""

from __future__ import annotations

import random
import struct

import pytest
from doll.errors import SampleError
from doll.records.packing import HEADER_BYTES, pack, unpack
from hypothesis import given
from hypothesis import strategies as st

SAMPLES = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=20)
EQUAL = st.integers(1, 20).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1, max_size=20))


@given(SAMPLES | EQUAL)
def test_comes_out_as_it_went_in(samples: list[bytes]) -> None:
    value = pack(samples)
    for given_value in (value, memoryview(value), memoryview(bytearray(value))):
        packed = unpack(given_value, max_count=len(samples))
        assert packed.num_samples == len(samples)
        assert packed.samples() == samples
        assert bytes(packed.body) == b"".join(samples)
    equal = len({len(sample) for sample in samples}) == 1
    assert packed.width == (len(samples[0]) if equal else 0)
    assert (packed.bounds == ()) == equal


def test_samples_of_one_length_cost_a_header_only() -> None:
    assert pack([b"abc", b"def"]) == b"DLPK\x01\x00\x00\x00" + struct.pack("<II", 2, 3) + b"abcdef"
    assert pack([b"a", b"bcd"]) == b"DLPK\x01\x00\x00\x00" + struct.pack("<IIII", 2, 0, 1, 3) + b"abcd"
    assert len(pack([bytes(100)] * 64)) == HEADER_BYTES + 6400


@pytest.mark.parametrize("samples", [[], [b""], [b"a", b"", b"b"]])
def test_packs_only_samples(samples: list[bytes]) -> None:
    with pytest.raises(ValueError, match="expected at least one sample, none of them empty"):
        pack(samples)


def header(*, magic: bytes = b"DLPK", version: int = 1, flags: int = 0, count: int = 1, width: int = 1) -> bytes:
    return struct.pack("<4sBBHII", magic, version, flags, 0, count, width)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"", "expected a packed record .first bytes DLPK., because data.samples_per_record is above 1"),
        (b'{"json": 1, "and": "more"}', "expected a packed record"),
        (header()[:-1], "expected a packed record"),
        (header(version=2) + b"a", "version 1 without flags, got version 2, flags 0"),
        (header(flags=1) + b"a", "got version 1, flags 1"),
        (header(count=0), "expected 1 to 4 samples in a packed record .data.samples_per_record., got 0"),
        (header(count=5) + b"abcde", "expected 1 to 4 samples .*, got 5"),
        (header(count=2**32 - 1, width=2**32 - 1), "got 4294967295"),
        (header(count=2, width=3) + b"abcde", "expected 2 samples of 3 bytes, got 5 bytes"),
        (header(count=2, width=3) + b"abcdefg", "expected 2 samples of 3 bytes, got 7 bytes"),
        (header(count=2, width=0) + bytes(7), "expected 2 sample lengths, got 7 bytes"),
        (header(count=2, width=0) + struct.pack("<II", 1, 0) + b"a", "a packed sample is empty"),
        (header(count=2, width=0) + struct.pack("<II", 1, 2) + b"ab", "expected 3 bytes of samples, got 2"),
        (header(count=2, width=0) + struct.pack("<II", 1, 2) + b"abcd", "expected 3 bytes of samples, got 4"),
    ],
)
def test_what_does_not_add_up_is_refused_with_the_reason(value: bytes, expected: str) -> None:
    with pytest.raises(SampleError, match=expected):
        unpack(value, max_count=4)


def test_20000_random_inputs_raise_nothing_else() -> None:
    rng = random.Random(1)
    good = [pack([b"abc", b"def"]), pack([b"a", b"bcd", b"ef"])]
    for round_ in range(20_000):
        if round_ % 3 == 0:
            value = rng.randbytes(rng.randrange(40))
        elif round_ % 3 == 1:
            value = b"DLPK\x01\x00\x00\x00" + struct.pack("<II", rng.randrange(6), rng.randrange(4)) + rng.randbytes(9)
        else:
            changed = bytearray(rng.choice(good))
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            value = bytes(changed)[: rng.randrange(len(changed) + 1)]
        try:
            packed = unpack(value, max_count=4)
        except SampleError:
            continue
        assert 1 <= packed.num_samples == len(packed.samples()) <= 4
        assert all(packed.samples())
