"""Batches of records that no client library writes, such as headers whose keys are no text and times of any clock:
built by hand (Kafka's batch format 2) and sent to the broker's socket (Produce, version 3)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from aiokafka.record.util import calc_crc32c, encode_varint

_TIMEOUT_S: Final = 30.0
Header = tuple[bytes, bytes | None]


def record(value: bytes | None, *, at: int = 0, key: bytes | None = None, headers: Sequence[Header] = ()) -> bytes:
    """One record, the one at place `at` of its batch."""
    body = b"\0" + _varint(0) + _varint(at) + _bytes(key) + _bytes(value) + _varint(len(headers))
    body += b"".join(_varint(len(name)) + name + _bytes(content) for name, content in headers)
    return _varint(len(body)) + body


def send(address: str, topic: str, partition: int, records: Sequence[bytes], *, timestamp_ms: int | None = None) -> int:
    """Write records as one batch. All have the same time; None: the present one.

    Returns:
        The broker's error code; 0: it has taken them.
    """
    stamp_ms = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
    count = len(records)
    tail = struct.pack(">hiqqqhii", 0, count - 1, stamp_ms, stamp_ms, -1, -1, -1, count) + b"".join(records)
    head = struct.pack(">ibI", -1, 2, calc_crc32c(tail))
    batch = struct.pack(">qi", 0, len(head) + len(tail)) + head + tail
    body = struct.pack(">hhii", -1, 1, 10_000, 1) + _text(topic) + struct.pack(">iii", 1, partition, len(batch)) + batch
    request = struct.pack(">hhi", 0, 3, 7) + _text("raw") + body
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), _TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
        answer = connection.recv(size, socket.MSG_WAITALL)
    # Its number, one topic, its name, one partition, its number; then the error.
    (error,) = struct.unpack_from(">h", answer, 4 + 4 + 2 + len(topic) + 4 + 4)
    return int(error)


def _varint(number: int) -> bytes:
    out = bytearray()
    encode_varint(number, out.append)
    return bytes(out)


def _bytes(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()
