"""The protocol between a program and the producer that it feeds, over a Unix socket on one machine. Pure.

The producer begins with a line of JSON: the number of samples of this source that each stream has already. It sends
such a line again as Kafka acknowledges more. The program answers with frames: a head of 8 bytes (length and stream,
little endian) and the record. A frame of stream `END` says that nothing more will come.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from doll.errors import RecordError

HEAD: Final = struct.Struct("<II")
END: Final = 0xFFFF_FFFF

_positions = msgspec.json.Decoder(list[int])


def frame(stream: int, record: bytes) -> bytes:
    """The frame of one record."""
    return HEAD.pack(len(record), stream) + record


def encode_positions(positions: Sequence[int]) -> bytes:
    """A line that says how many samples each stream has."""
    return msgspec.json.encode(list(positions)) + b"\n"


def decode_positions(line: bytes, streams: int) -> list[int]:
    """The positions that `encode_positions` has put into a line; raises RecordError if it is not one number for each of
    the streams."""
    try:
        positions = _positions.decode(line)
    except msgspec.MsgspecError as exc:
        raise RecordError(f"expected a list with the samples of each stream, got {line[:80]!r}: {exc}") from exc
    if len(positions) != streams or min(positions) < 0:
        raise RecordError(f"expected {streams} numbers of samples, got {positions[:8]}")
    return positions
