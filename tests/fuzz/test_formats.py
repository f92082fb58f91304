"""Each format's reader against mutated values: in bulk it gives what it gives one by one, and never another error."""

from __future__ import annotations

from typing import Any

import click_messages
import msgspec
import pytest
from doll.errors import BadRecordsError
from doll.formats.avro import AvroReader
from doll.formats.csv_lines import CsvReader
from doll.formats.protobuf import ProtobufReader
from doll.formats.reader import FieldReader, JsonReader
from doll.formats.registry import NotInRegistryError, RegisteredSchema, RegistryClient
from fake_registry import avro, schema
from fuzzing import inputs

pytestmark = pytest.mark.fuzz


class Click(msgspec.Struct):
    user: int
    price: float
    clicked: bool = False
    tags: list[int] = []
    name: str | None = None


FIELDS: dict[str, Any] = {"user": 2**53 + 1, "price": 1.5, "clicked": True, "tags": [1, 2], "name": "x"}
SCHEMAS = {
    1: schema(
        ("user", "long"), ("price", "double"), ("clicked", "boolean"), ("tags", {"type": "array", "items": "long"}),
        ("name", ["null", "string"]),
    ),
    2: schema(("price", "float"), ("user", "long")),
}  # fmt: skip


class Known(RegistryClient):
    def __init__(self) -> None:
        self.url = "http://registry"

    def by_id(self, number: int) -> RegisteredSchema:
        if number not in SCHEMAS:
            raise NotInRegistryError("40403: Schema not found")
        return RegisteredSchema(msgspec.json.encode(SCHEMAS[number]).decode(), "AVRO")


def cases() -> dict[str, tuple[FieldReader, list[bytes]]]:
    message = click_messages.Click(user=2**53 + 1, price=1.5, tags=[1, 2]).SerializeToString()
    text = msgspec.json.encode(FIELDS)
    return {
        "avro": (AvroReader(Click, Known()), [avro(1, SCHEMAS[1], FIELDS), avro(2, SCHEMAS[2], FIELDS)]),
        "protobuf": (ProtobufReader(Click, click_messages.Click, header=True), [b"\0\0\0\0\1\0" + message]),
        "json_schema": (JsonReader(Click, has_header=True), [b"\0\0\0\0\1" + text]),
        "csv": (CsvReader(Click, ["user", "price", "name"], ","), [b'1,2.5,"a,b"', b"2,,x", b"9007199254740993,1,"]),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_values_are_read_or_refused(name: str) -> None:
    reader, seeds = cases()[name]
    batch: list[bytes] = []
    reasons: list[str] = []
    refused: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    read = 0
    for data in inputs(f"format {name}", 5_000, seeds):
        batch.append(data)
        if len(batch) < 8:
            continue
        alone: list[Any] = []
        for value in batch:
            try:
                alone.append(reader.read_one(value))
            except Exception as exc:
                reasons.append(f"{exc}")
                alone.append(None)
        bad = tuple(at for at, event in enumerate(alone) if event is None)
        try:
            together = reader.read(batch)
        except BadRecordsError as exc:
            refused.append((exc.positions, bad))
            batch = [value for at, value in enumerate(batch) if at not in bad]
            together = reader.read(batch) if batch else []
        # As text: NaN is not equal to itself.
        assert repr(together) == repr([event for event in alone if event is not None])
        read += len(together)
        batch = []
    assert read > 0
    assert all(reasons)
    assert all(in_bulk == alone for in_bulk, alone in refused)
