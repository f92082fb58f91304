"""A task that takes records of every format, told apart by their first byte, and five bad records of each kind in each.

The kinds: headers, text that is not UTF-8, depth, numbers at the edge of their type. Each has in its dead letter the
name of the field that is at fault.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import click_messages
import msgspec
import numpy as np
from doll import BadRecordsError, Field, FieldsTask, UInt64
from doll.formats.avro import PlainAvroReader
from doll.formats.csv_lines import CsvReader
from doll.formats.protobuf import ProtobufReader
from doll.formats.reader import FieldReader, JsonReader
from fake_registry import avro, schema

NODE = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
AVRO = schema(("user", "long"), ("seen", "long"), ("price", "double"), ("name", "string"), ("more", ["null", NODE]))
_BYTES = struct.Struct("<Qqd")
NO_TEXT = [b"\xff\xfe", b"\xe9", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"]  # Latin-1, cut off, a surrogate, too long
TIMES_MS = [-1, 0, 1_700_000_000, 1_700_000_000_000_000, 2**62]  # none, 1970, seconds, microseconds, the far future


class Event(msgspec.Struct):
    user: UInt64
    price: float
    seen: int = 0
    name: str = ""
    more: Any = None


class _Bytes(FieldReader):
    """As a person writes it."""

    def read_one(self, value: bytes) -> Any:
        user, seen, price = _BYTES.unpack_from(value)
        return msgspec.convert({"user": user, "seen": seen, "price": price, "name": value[24:].decode()}, Event)


class _EveryFormat(FieldReader):
    def __init__(self) -> None:
        super().__init__(Event)
        self._readers: dict[bytes, FieldReader] = {
            b"J": JsonReader(Event),
            b"A": PlainAvroReader(Event, json.dumps(AVRO), "here"),
            b"P": ProtobufReader(Event, click_messages.Event, header=False),
            b"C": CsvReader(Event, ["user", "price", "seen", "name"], ","),
            b"B": _Bytes(Event),
        }

    def read_one(self, value: bytes) -> Any:
        return self._readers[value[:1]].read_one(value[1:])


class EveryFormat(FieldsTask):
    """Learns whether a user's id is even. A record without a known first byte is JSON of x and y."""

    record = Event
    reader = _EveryFormat()
    whole_records = True
    num_classes = 2

    def build_model(self) -> Any:
        import torch

        return torch.nn.Linear(3, 2)

    def spec(self) -> Any:
        return {"user": Field("uint64"), "x": Field("float32", (3,))}, None

    def forward(self, model: Any, x: Any) -> Any:
        return model(x["x"])

    def samples(self, columns: Any) -> Any:
        records = columns.records
        if old := [at for at, stamp in enumerate(records.timestamps_ms.tolist()) if not 1.7e12 < stamp < 1e13]:
            raise BadRecordsError(old)
        x = np.stack([columns["price"], columns["seen"] / 1e18, np.zeros(len(records))], axis=1)
        return {"user": columns["user"], "x": x}, columns["user"] % np.uint64(2)

    def decode_record(self, record: Any) -> Any:
        if record.value[:1] in b"JAPCB":
            return super().decode_record(record)
        event = json.loads(record.value)
        x = np.array(event["x"])
        return {"user": np.uint64(0), "x": x}, event["y"]


class BadRecord(NamedTuple):
    """One record of `EveryFormat`, and what its dead letter says."""

    value: bytes | None
    reason: str
    header: bytes | None = None  # the key of a header, of a value that is good by itself


def good(form: str, user: int = 2**64 - 1, **others: Any) -> bytes:
    """A record of one of the formats J, A, P, C, B."""
    fields: dict[str, Any] = {"user": user, "price": 0.5, "seen": 2**53 + 1, "name": "x"} | others
    match form:
        case "J":
            return b"J" + msgspec.json.encode(fields)
        case "A":
            signed = fields | {"user": user % 2**63, "more": others.get("more")}  # Avro has no type without a sign
            return b"A" + avro(1, AVRO, signed)[5:]
        case "P":
            return b"P" + bytes(click_messages.Event(**fields).SerializeToString())
        case "C":
            return "C{user},{price},{seen},{name}".format(**fields).encode()
    head: bytes = _BYTES.pack(fields["user"], fields["seen"], fields["price"])
    return b"B" + head + bytes(fields["name"], "utf-8")


def bad_records() -> Iterator[BadRecord]:
    """Five of each kind in each format that has it."""
    for form in "JAPCB":
        for key in NO_TEXT:
            yield BadRecord(good(form), "headers: expected keys in UTF-8", header=key)
        for text in NO_TEXT:
            value = good(form, name="~~")
            if form in "AP":  # their texts have a length before them
                size = {"A": 2 * len(text), "P": len(text)}[form]
                value = value.replace({"A": b"\x04~~", "P": b"\x02~~"}[form], bytes([size]) + text)
            yield BadRecord(value.replace(b"~~", text), "name" if form != "B" else "UnicodeDecodeError")
    for text in (b"[" * 100_000, b"[" * 2000 + b"]" * 2000, b'{"more":' * 100_000, b'[{"a":' * 5000, b"[[1," * 9000):
        yield BadRecord(b'J{"user": 1, "price": 1, "more": ' + text, "more: RecursionError")
    leaf: dict[str, Any] = {"next": None}
    head = good("A", more=leaf)[:-1]
    for depth in (2_000, 5_000, 10_000, 50_000, 200_000):
        yield BadRecord(head + b"\2" * depth + b"\0", "more: RecursionError")
    for depth in (101, 150, 200, 1000, 5000):
        value = b""
        for _ in range(depth):
            size = len(value)
            value = b"\x2a" + (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])) + value
            if size > 16_000:
                break
        yield BadRecord(b"P" + value, "more: DecodeError")
    yield from _numbers()


def _numbers() -> Iterator[BadRecord]:
    for text, reason in (
        (b'"user": 18446744073709551616, "price": 1', "user: expected an integer from 0 to 18446744073709551615"),
        (b'"user": -1, "price": 1', "`$.user`"),
        (b'"user": 9007199254740993.0, "price": 1', "`$.user`"),
        (b'"user": 1, "price": 1e400', "`$.price`"),
        (b'"user": 1, "price": 1, "seen": 9223372036854775808', "seen: expected an integer from"),
    ):
        yield BadRecord(b"J{" + text + b"}", reason)
    for line, reason in (
        (b"18446744073709551616,1,1,x", "user: expected an integer from 0"),
        (b"9007199254740993.0,1,1,x", "user: expected an integer, got 9007199254740993.0"),
        (b"1,1e400,1,x", "`$.price`, in the cell '1e400'"),
        (b"1,nan,1,x", "price is NaN or infinite"),
        (b"1,1,-9223372036854775809,x", "seen: expected an integer from"),
    ):
        yield BadRecord(b"C" + line, reason)
    for form in "APB":
        for price in (float("nan"), float("inf"), -float("inf"), 1e39, -1e300):
            reason = (
                "price is NaN or infinite" if abs(price) > 1e308 or price != price else 'x["x"] holds NaN or infinity'
            )
            yield BadRecord(good(form, price=price), reason)
