"""IDX files, MNIST's format, plain or .gz: two zero bytes, type 0x08, rank, then big-endian sizes, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, Final, cast

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError

_MAX_BYTES: Final = 1 << 33
_CHUNK_BYTES: Final = 1 << 24


def read(path: Path, rank: int, limit: int | None = None) -> npt.NDArray[np.uint8]:
    """The first `limit` items (default: all) of an IDX file of unsigned bytes with `rank` dimensions.

    Raises:
        ConfigError: the file is not there, not IDX, of another type or rank, or shorter than it says.
    """
    expected = f"expected an IDX file of unsigned bytes with {rank} dimension{'s' * (rank > 1)}"
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * rank)
            if len(head) < 4 or head[:2] != b"\0\0":
                raise ConfigError(f"{path}: {expected}, got first bytes {head[:4].hex() or '(empty file)'}")
            if head[2] != 0x08 or head[3] != rank:
                raise ConfigError(f"{path}: {expected}, got type 0x{head[2]:02x} with {head[3]} dimensions")
            if len(head) < 4 + 4 * rank:
                raise ConfigError(f"{path}: {expected}, got a header cut off after {len(head)} bytes")
            count, *shape = struct.unpack_from(f">{rank}I", head, 4)
            count = count if limit is None else min(count, limit)
            size = math.prod(shape)
            if not 0 < size <= 1 << 20:
                raise ConfigError(f"{path}: expected items of 1 to {1 << 20} bytes, got sizes {shape}")
            if count * size > _MAX_BYTES:
                raise ConfigError(
                    f"{path}: expected at most {_MAX_BYTES} bytes, since all of it is held in memory; the header "
                    f"announces {count} items of {size} bytes"
                )
            body = _read(cast("BinaryIO", file), count * size)
    except (OSError, EOFError, zlib.error, MemoryError) as exc:
        raise ConfigError(f"{path}: {expected}: {getattr(exc, 'strerror', None) or exc or 'no memory for it'}") from exc
    if len(body) < count * size:
        raise ConfigError(f"{path}: expected {count} items of {size} bytes, got {len(body)} bytes")
    return np.frombuffer(body, np.uint8).reshape(count, *shape)


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    """At most so many bytes. Memory grows with what is there, not with what the header announces."""
    data = bytearray()
    while len(data) < num_bytes and (chunk := file.read(min(_CHUNK_BYTES, num_bytes - len(data)))):
        data += chunk
    return bytes(data)


def read_pair(
    images: Path, labels: Path, limit: int | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images (n, height, width) and labels (n,) of two IDX files.

    Raises:
        ConfigError: as in `read`, or the two files differ in their number of items.
    """
    pixels, classes = read(images, 3, limit), read(labels, 1, limit)
    if len(pixels) != len(classes):
        raise ConfigError(
            f"expected as many labels as images, got {len(pixels)} in {images}, {len(classes)} in {labels}"
        )
    return pixels, classes
