"""Many refused offsets and holes in a Push or an Update: short, and read as they were written."""

from __future__ import annotations

import random

import pytest
from doll.errors import RecordError
from doll.records.control import Push, PushedBatch, bits_of, decode, encode, num_bytes, offsets_of, ranges_of
from msgspec.structs import replace

BASE = 2**40
N = 100_000
LIMIT_BYTES = 1_000_000


def pushed(**names: tuple[object, ...]) -> PushedBatch:
    return PushedBatch(batch=3, grant_id=7, n_samples=1, loss_sum=0.5, **names)  # type: ignore[arg-type]


def push(*batches: PushedBatch) -> Push:
    return Push(worker=1, session=2, term=3, version=4, key="k", batches=batches)


def test_ranges_are_read_as_they_were_written() -> None:
    rng = random.Random(1)
    for _ in range(200):
        edges = sorted(rng.sample(range(1_000), 2 * rng.randrange(1, 40)))
        ranges = tuple((BASE + lo, BASE + hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True))
        data = bits_of(ranges)
        assert ranges_of(data) == ranges
        assert len(data) == num_bytes(ranges[0][0], ranges[-1][1])


@pytest.mark.parametrize("data", [b"", b"12345678", bytes(1_250_009)])
def test_bits_of_no_batch_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError, match="offsets as bits: expected 9 to 1250008 bytes"):
        ranges_of(data)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_push_of_batches_whose_records_are_refused_fits_into_a_megabyte(step: int) -> None:
    dead = tuple(range(BASE, BASE + N, step))
    assert len(encode(push(*[pushed(dead=dead)] * 30))) < LIMIT_BYTES
    record = push(*[pushed(dead=dead)] * 3)
    assert decode(encode(record)) == record


@pytest.mark.slow
def test_a_push_of_a_batch_with_holes_everywhere_fits_too() -> None:
    gaps = tuple((at, at + 1) for at in range(BASE, BASE + N, 4))
    lost = tuple((at, at + 1) for at in range(BASE + 2, BASE + N, 4))
    assert len(encode(push(*[pushed(gaps=gaps, lost=lost)] * 30))) < LIMIT_BYTES
    record = push(*[pushed(gaps=gaps, lost=lost)] * 3)
    assert decode(encode(record)) == record


@pytest.mark.parametrize("count", [0, 1, 16, 17])
def test_few_offsets_far_from_each_other_are_written_as_before(count: int) -> None:
    record = push(pushed(dead=tuple(BASE + 1_000 * at for at in range(count)), gaps=((BASE + 1, BASE + 900),)))
    assert b"packed" not in encode(record)
    assert decode(encode(record)) == record


def test_a_time_slice_of_held_out_records_is_short_and_read_as_it_was_written() -> None:
    record = push(pushed(held_out=tuple(range(BASE, BASE + 1_000)), dead=(BASE + 2_000,)))
    assert len(encode(record)) < 400
    assert decode(encode(record)) == record
    mixed = push(pushed(held_out=tuple(range(BASE, BASE + 90, 3)), dead=tuple(range(BASE + 1, BASE + 90, 3))))
    assert decode(encode(mixed)) == mixed


def test_offsets_as_bits_of_a_release_without_held_out_records_are_read() -> None:
    bits = bits_of(((7, 9),))
    assert decode(encode(push(pushed(packed=(bits, b"", b""))))) == push(pushed(dead=(7, 8)))
    with pytest.raises(RecordError, match="expected those of dead, gaps, lost, held_out, got 2"):
        decode(encode(push(pushed(packed=(bits, b"")))))


def test_ranges_that_cannot_be_are_written_as_they_are() -> None:
    record = push(pushed(gaps=((5, 3), (-4, 9), *((at, at + 1) for at in range(40)))))
    assert decode(encode(record)) == record


def test_a_record_that_says_of_two_of_three_what_is_packed_is_refused() -> None:
    record = replace(push(pushed()), batches=(replace(pushed(), packed=(b"", b"")),))
    with pytest.raises(RecordError, match="expected those of dead, gaps, lost, held_out, got 2"):
        decode(encode(record))


def test_offsets_of_ranges() -> None:
    assert offsets_of(((3, 5), (8, 9))) == (3, 4, 8)
