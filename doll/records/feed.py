"""The protocol between a program and the producer that it feeds, over a Unix socket on one machine. Pure.

The producer starts with a line of JSON: for each stream, the number of samples of this source that the stream already
has. The producer sends an updated line whenever Kafka has acknowledged more. The program sends frames: a head of 8
bytes (length and stream number, little-endian), followed by the record. A frame with stream number `END` ends the
input.
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
    """Return the frame of one record."""
    return HEAD.pack(len(record), stream) + record


def encode_positions(positions: Sequence[int]) -> bytes:
    """Encode the number of samples of each stream as a line."""
    return msgspec.json.encode(list(positions)) + b"\n"


def decode_positions(line: bytes, streams: int) -> list[int]:
    """Decode a line of `encode_positions`. Raise RecordError if the line does not have one number for each stream."""
    try:
        positions = _positions.decode(line)
    except msgspec.MsgspecError as exc:
        raise RecordError(f"expected a list with the samples of each stream, got {line[:80]!r}: {exc}") from exc
    if len(positions) != streams or min(positions) < 0:
        raise RecordError(f"expected {streams} numbers of samples, got {positions[:8]}")
    return positions
