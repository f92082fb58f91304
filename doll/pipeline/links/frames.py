"""The form of a message between stages: a header and arrays. Pure.

A frame consists of a prefix, a table with the type and shape of each array, the header, and the bytes of the arrays in
C order, one array after the other. Numbers are little-endian. A received frame is checked before memory is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.errors import DollError

Array = npt.NDArray[Any]

MAX_ARRAYS: Final = 130
MAX_CROSSING: Final = 64  # tensors between two stages; up to 64 arrays of y, the weights and the groups are added
MAX_DIMENSIONS: Final = 8
MAX_HEADER_BYTES: Final = 1 << 16
# numpy lacks bfloat16. Instead, a field of this name contains the 16 bits of each number.
BFLOAT16: Final = np.dtype([("bfloat16", "<u2")])
# The code of a type is its index in this tuple, so append new types at the end.
DTYPES: Final = (
    *(np.dtype(name) for name in ("<f4", "<f8", "<f2", "<i8", "<i4", "|u1", "|b1", "<i2", "|i1", "<c8", "<c16")),
    BFLOAT16,
)

_MAGIC: Final = b"dpl1"
_PREFIX: Final = struct.Struct("<4sHHIQ")  # magic, number of arrays, place, size of the header, size of the arrays
_ARRAY: Final = struct.Struct(f"<HH4x{MAX_DIMENSIONS}Q")  # code of the type, number of dimensions, shape padded with 0
_PLACE: Final = 6  # offset of the place in the prefix
PREFIX_BYTES: Final = _PREFIX.size
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_NAMES: Final = ", ".join("bfloat16" if dtype == BFLOAT16 else dtype.name for dtype in DTYPES)


class LinkFrameError(DollError):
    """A message between stages, received or to be sent, is not valid or exceeds a limit."""


class Prefix(NamedTuple):
    """The first `PREFIX_BYTES` of a frame.

    Attributes:
        place: location of the bytes of the arrays. 0: in the frame. Only some links use other values.
    """

    arrays: int
    place: int
    header_bytes: int
    payload_bytes: int

    @property
    def rest_bytes(self) -> int:
        """The size of the table and of the header, which follow the prefix."""
        return self.arrays * _ARRAY.size + self.header_bytes


class ArraySpec(NamedTuple):
    """Type and shape of an array of a frame."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def as_sent(array: Array) -> Array:
    """Return `array` in C order and little-endian. The result is a copy only if a conversion is needed. Raise
    LinkFrameError if the type of the array is not in `DTYPES`."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        raise LinkFrameError(f"expected an array of {_NAMES}, got {array.dtype}: convert it before it is sent")
    return np.asarray(array, dtype=dtype, order="C")  # not ascontiguousarray, which makes a 0-d array 1-d


def bytes_of(array: Array) -> memoryview:
    """Return the memory of an array in C order; it is writable if the array is."""
    return array.reshape(-1).view(np.uint8).data


def encode(header: bytes, arrays: Sequence[Array], max_message_bytes: int) -> bytes:
    """Return the prefix, the table and the header of a frame.

    Args:
        arrays: arrays as `as_sent` returns them.
        max_message_bytes: maximum size of all arrays together.

    Raises:
        LinkFrameError: a limit is exceeded.
    """
    prefix = Prefix(len(arrays), 0, len(header), sum(array.nbytes for array in arrays))
    _check(prefix, max_message_bytes)
    table = bytearray()
    for array in arrays:
        if array.ndim > MAX_DIMENSIONS:
            raise LinkFrameError(f"expected an array of at most {MAX_DIMENSIONS} dimensions, got {array.ndim}")
        shape = array.shape + (0,) * (MAX_DIMENSIONS - array.ndim)
        table += _ARRAY.pack(_CODES[array.dtype], array.ndim, *shape)
    return _PREFIX.pack(_MAGIC, *prefix) + table + header


def at_place(head: bytes, place: int) -> bytes:
    """Return `head`, a result of `encode`, with another `Prefix.place`."""
    return head[:_PLACE] + place.to_bytes(2, "little") + head[_PLACE + 2 :]


def decode_prefix(data: bytes | bytearray, max_message_bytes: int) -> Prefix:
    """Decode the prefix of a frame. Raise LinkFrameError if `data` is not a prefix, or the announced sizes exceed a
    limit."""
    magic, *fields = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise LinkFrameError(
            f"expected a frame that begins with {_MAGIC!r}, got {magic!r}: the other end is no stage of this release"
        )
    prefix = Prefix(*fields)
    _check(prefix, max_message_bytes)
    return prefix


def decode_rest(prefix: Prefix, data: bytes | bytearray) -> tuple[bytes, list[ArraySpec]]:
    """Decode the header and the specifications of the arrays from the `prefix.rest_bytes` bytes after the prefix.

    Raises:
        LinkFrameError: an array has an unknown type or impossible shape, or the arrays have another size than
            announced.
    """
    table_bytes = prefix.arrays * _ARRAY.size
    specs = [_spec(*fields) for fields in _ARRAY.iter_unpack(memoryview(data)[:table_bytes])]
    # An impossible dimension must be found even if another dimension is 0.
    for spec in specs:
        if math.prod(max(size, 1) for size in spec.shape) * spec.dtype.itemsize >= 1 << 63:
            raise LinkFrameError(f"expected the shape of an array, got {spec.shape}")
    total_bytes = sum(spec.size_bytes for spec in specs)
    if total_bytes != prefix.payload_bytes:
        shapes = ", ".join(f"{spec.dtype.name}{list(spec.shape)}" for spec in specs)
        raise LinkFrameError(f"expected arrays of {prefix.payload_bytes} bytes, got {total_bytes} bytes in {shapes}")
    return bytes(memoryview(data)[table_bytes:]), specs


def _check(prefix: Prefix, max_message_bytes: int) -> None:
    for what, value, limit in (
        ("arrays", prefix.arrays, MAX_ARRAYS),
        ("bytes of header", prefix.header_bytes, MAX_HEADER_BYTES),
        ("bytes of arrays", prefix.payload_bytes, max_message_bytes),
    ):
        if value > limit:
            raise LinkFrameError(f"expected a message with at most {limit} {what}, got {value}")


def _spec(code: int, dimensions: int, *shape: int) -> ArraySpec:
    if code >= len(DTYPES):
        raise LinkFrameError(f"expected the code of a type below {len(DTYPES)} ({_NAMES}), got {code}")
    if dimensions > MAX_DIMENSIONS or any(shape[dimensions:]):
        raise LinkFrameError(f"expected a shape of at most {MAX_DIMENSIONS} dimensions, got {dimensions} in {shape}")
    return ArraySpec(DTYPES[code], shape[:dimensions])
