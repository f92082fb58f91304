"""Packed records: several samples in one Kafka record, for streams above about 20,000 samples/s per worker.

Layout, little-endian: magic `DLPK`, u8 version = 1, u8 flags = 0, u16 reserved = 0, u32 number of samples m, u32 width;
if width is 0, m lengths of type u32; then the m samples, concatenated. Each sample has the bytes that the value of an
unpacked record would have.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from doll.errors import SampleError

MAGIC: Final = b"DLPK"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sBBHII")
HEADER_BYTES: Final = _HEADER.size


class PackedRecord(NamedTuple):
    """The samples of a packed record. `body` contains the concatenated samples, each `width` bytes long. `width` 0: the
    lengths differ, and `bounds` has the positions."""

    num_samples: int
    width: int
    body: memoryview
    bounds: tuple[int, ...]  # num_samples + 1 positions in `body` if width is 0, else empty

    def samples(self) -> list[bytes]:
        """Return the bytes of each sample."""
        bounds = self.bounds or tuple(range(0, self.num_samples * self.width + 1, self.width))
        body = bytes(self.body)
        return [body[a:b] for a, b in pairwise(bounds)]


def pack(samples: Sequence[bytes]) -> bytes:
    """Return the value of a packed record with `samples`. Raise ValueError if there is no sample, or one is empty."""
    if not samples or not all(samples):
        raise ValueError("expected at least one sample, none of them empty")
    lengths = [len(sample) for sample in samples]
    width = lengths[0] if len(set(lengths)) == 1 else 0
    table = b"" if width else struct.pack(f"<{len(lengths)}I", *lengths)
    return b"".join((_HEADER.pack(MAGIC, VERSION, 0, 0, len(samples), width), table, *samples))


def unpack(value: bytes | memoryview, max_count: int) -> PackedRecord:
    """Return the samples in the packed record `value`. Raise SampleError if `value` is not a packed record, has another
    version, has more than `max_count` samples, or has lengths that do not fit its size."""
    view = memoryview(value)
    if len(view) < HEADER_BYTES or bytes(view[:4]) != MAGIC:
        raise SampleError("expected a packed record (first bytes DLPK), because data.samples_per_record is above 1")
    _, version, flags, _, count, width = _HEADER.unpack_from(view)
    if version != VERSION or flags:
        raise SampleError(
            f"expected packed record version {VERSION} without flags, got version {version}, flags {flags}"
        )
    if not 1 <= count <= max_count:
        raise SampleError(
            f"expected 1 to {max_count} samples in a packed record (data.samples_per_record), got {count}"
        )
    body = view[HEADER_BYTES:]
    if width:
        if len(body) != count * width:
            raise SampleError(f"expected {count} samples of {width} bytes, got {len(body)} bytes")
        return PackedRecord(count, width, body, ())
    if len(body) < 4 * count:
        raise SampleError(f"expected {count} sample lengths, got {len(body)} bytes")
    bounds = [0]
    for length in struct.unpack_from(f"<{count}I", body):
        if length == 0:
            raise SampleError("a packed sample is empty")
        bounds.append(bounds[-1] + length)
    body = body[4 * count :]
    if len(body) != bounds[-1]:
        raise SampleError(f"expected {bounds[-1]} bytes of samples, got {len(body)}")
    return PackedRecord(count, 0, body, tuple(bounds))
