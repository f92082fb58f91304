"""Avro by the schemas of a registry: evolution in mid-stream, resolution, and what is wrong with a schema."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fastavro
import msgspec
import pytest
from doll.errors import BadRecordsError, ConfigError, RetryLater, SampleError
from doll.formats.avro import AvroReader, PlainAvroReader, _is_recursive
from doll.formats.registry import RegistryClient
from fake_registry import FakeRegistry, avro, fake_registry, schema


class Click(msgspec.Struct):
    user: int
    price: float
    clicked: bool
    country: str = "?"
    age: float | None = None


FIRST = schema(("user", "long"), ("price", "float"), ("clicked", "boolean"))
SECOND = schema(
    ("clicked", "boolean"), ("price", "double"), ("user", "long"), ("country", "string"), ("age", ["null", "int"])
)
BIG = 2**53 + 1


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        registry.add(1, FIRST)
        registry.add(2, SECOND)
        yield registry


def reader_of(registry: FakeRegistry, record: type[msgspec.Struct] = Click, **options: Any) -> AvroReader:
    return AvroReader(record, RegistryClient(registry.url, {}), **options)


def first(user: int, number: int = 1) -> bytes:
    return avro(number, FIRST, {"user": user, "price": 1.5, "clicked": True})


def second(user: int) -> bytes:
    return avro(2, SECOND, {"user": user, "price": 2, "clicked": False, "country": "DE", "age": 40})


def test_a_schema_that_evolves_in_mid_stream_is_followed(registry: FakeRegistry) -> None:
    reader = reader_of(registry)
    assert reader.read([first(BIG), second(-BIG), first(1)]) == [
        Click(BIG, 1.5, True), Click(-BIG, 2.0, False, "DE", 40.0), Click(1, 1.5, True),
    ]  # fmt: skip
    for _ in range(3):
        reader.read([second(1), second(2)])
    assert reader.read_one(first(3)).user == 3
    assert sorted(path for path, _ in registry.asked) == ["/schemas/ids/1", "/schemas/ids/2"]


def test_records_are_resolved_to_a_version_of_the_subject(registry: FakeRegistry) -> None:
    resolved = schema(
        ("user", "long"), ("price", "double"), ("clicked", "boolean"),
        {"name": "country", "type": "string", "default": "XX"},
    )  # fmt: skip
    registry.add_version("clicks-value", 4, resolved)
    reader = reader_of(registry, subject="clicks-value", version=4)
    assert reader.read([first(1), second(2)]) == [Click(1, 1.5, True, "XX"), Click(2, 2.0, False, "DE")]


def test_bad_values_are_named_with_their_reasons(registry: FakeRegistry) -> None:
    reader = reader_of(registry)
    values = [first(1), b"{}", b"\0\0", first(2) + b"x", first(3)[:-1], first(4, number=9), first(5)]
    with pytest.raises(BadRecordsError) as caught:
        reader.read(values)
    assert caught.value.positions == (1, 2, 3, 4, 5)
    for value, text in [
        (values[1], "expected the header of a schema registry"),
        (values[2], "expected the header"),
        (values[3], "got 1 bytes more"),
        (values[5], r"schema 9 is not in the registry at http://\S+ \(40403: Schema not found\)"),
    ]:
        with pytest.raises(SampleError, match=text):
            reader.read_one(value)


def test_an_unknown_schema_is_asked_for_again_after_a_while(registry: FakeRegistry) -> None:
    now = [0.0]
    reader = reader_of(registry, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(SampleError, match="schema 3 is not in the registry"):
            reader.read_one(first(1, number=3))
    assert len(registry.asked) == 1
    registry.add(3, FIRST)
    now[0] = 31.0
    assert reader.read_one(first(1, number=3)).user == 1


def test_a_registry_that_is_away_makes_no_record_bad(registry: FakeRegistry) -> None:
    reader = reader_of(registry)
    reader.read([first(1)])
    registry.down = (503, b"")
    assert reader.read([first(1)]), "its schema is known"
    reads: list[Callable[[], Any]] = [
        lambda: reader.read([first(1), second(2), b"rubbish"]), lambda: reader.read_one(second(1)),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(RetryLater, match="HTTP 503"):
            read()
    registry.down = None
    assert reader.read([first(1), second(2)])[1].user == 2


def test_a_field_that_vanishes_is_named_with_the_remedy(registry: FakeRegistry) -> None:
    without = schema(("user", "long"), ("clicked", "boolean"))
    registry.add(5, without)
    value = avro(5, without, {"user": 1, "clicked": True})
    reader = reader_of(registry)
    text = r"schema 5 has no field price, which the task's Click requires \(it has: user, clicked\): give Click.price a"
    with pytest.raises(SampleError, match=text):
        reader.read_one(value)
    with pytest.raises(BadRecordsError) as caught:
        reader.read([value, first(1)])
    assert caught.value.positions == (0,)


def test_a_wrong_subject_ends_the_job_and_similar_ones_are_named(registry: FakeRegistry) -> None:
    registry.answers["/subjects"] = (200, ["clicks-value", "orders-value"])
    with pytest.raises(ConfigError, match=r"data.format.subject: .* no version latest of subject click .*clicks-value"):
        reader_of(registry, subject="click").read([first(1)])


def test_a_version_without_a_field_ends_the_job(registry: FakeRegistry) -> None:
    registry.add_version("clicks-value", 1, schema(("user", "long")))
    with pytest.raises(ConfigError, match="version 1 of subject clicks-value has no field price, clicked"):
        reader_of(registry, subject="clicks-value", version=1).read([first(1)])


def test_the_newest_schema_of_a_subject_may_lack_a_field_that_records_have(registry: FakeRegistry) -> None:
    registry.add_version("clicks-value", "latest", schema(("user", "long")))
    assert reader_of(registry, subject="clicks-value").read([first(1)])


def test_types_are_checked(registry: FakeRegistry) -> None:
    other = schema(("user", "long"), ("price", "string"), ("clicked", "boolean"))
    registry.add(6, other)
    with pytest.raises(ValueError, match=r"Expected `float`, got `str` - at `\$.price`"):
        reader_of(registry).read_one(avro(6, other, {"user": 1, "price": "1.0", "clicked": True}))


def test_named_types_of_other_subjects_are_followed(registry: FakeRegistry) -> None:
    place = schema(("country", "string"), name="Place")
    registry.add(8, schema(("place", "Place")), references=[{"name": "Place", "subject": "place", "version": 1}])
    registry.add_version("place", 1, place)

    class Visit(msgspec.Struct):
        place: dict[str, str]

    value = avro(8, schema(("place", place)), {"place": {"country": "DE"}})
    assert reader_of(registry, Visit).read_one(value).place == {"country": "DE"}


def test_a_uuid_is_the_text_that_avro_stores(registry: FakeRegistry) -> None:
    registry.add(9, schema(("user", {"type": "string", "logicalType": "uuid"})))
    text = "2b9ae968-5387-4691-bb39-3fc74278b589"
    value = avro(9, schema(("user", "string")), {"user": text})
    for kind, expected in ((str, text), (uuid.UUID, uuid.UUID(text))):
        record = msgspec.defstruct("Visit", [("user", kind)])
        assert reader_of(registry, record).read_one(value).user == expected


def test_the_field_that_cannot_be_read_is_named(registry: FakeRegistry) -> None:
    reader, good = reader_of(registry), second(1)
    assert reader.read_one(good).country == "DE"
    for value, text in (
        (good.replace(b"DE", b"\xff\xfe"), "country: UnicodeDecodeError"),
        (good[:12], "the value ends within price: is it cut off"),
        (good[:-1], "the value ends within age"),
        (good.replace(b"\x04DE", b"\xff\xff\xff\xff\x0fDE"), "within country"),
    ):
        with pytest.raises(SampleError, match=text):
            reader.read_one(value)


NODE = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
LEAF = {"type": "record", "name": "Leaf", "fields": [{"name": "n", "type": "long"}]}


@pytest.mark.parametrize("is_reference", [False, True])
def test_records_in_records_without_end_are_refused_and_do_not_end_the_process(
    registry: FakeRegistry, is_reference: bool
) -> None:
    """The decoder in C would overflow its stack: a signal, and no exception."""
    whole = schema(("user", "long"), ("more", NODE))
    if is_reference:
        registry.add_version("node", 1, NODE)
        named = schema(("user", "long"), ("more", "Node"))
        registry.add(9, named, references=[{"name": "Node", "subject": "node", "version": 1}])
    else:
        registry.add(9, whole)
    reader = reader_of(registry, msgspec.defstruct("Tree", [("user", int), ("more", Any)]))
    good = avro(9, whole, {"user": 3, "more": {"next": {"next": {"next": None}}}})
    assert reader.read_one(good).more == {"next": {"next": {"next": None}}}
    with pytest.raises(SampleError, match="more: RecursionError"):
        reader.read_one(good[:6] + b"\2" * 200_000 + b"\0")


def test_schemas_that_hold_themselves_are_known() -> None:
    known = [
        NODE, schema(("a", {"type": "array", "items": NODE})), schema(("a", {"type": "map", "values": NODE})),
        schema(("a", {"type": "record", "name": "B", "fields": [{"name": "c", "type": ["null", "Click"]}]})),
    ]  # fmt: skip
    assert [_is_recursive(fastavro.parse_schema(item, named_schemas={})) for item in known] == [True] * 4
    others = [FIRST, SECOND, LEAF, schema(("a", LEAF), ("b", "Leaf"), ("c", {"type": "array", "items": "Leaf"}))]
    assert [_is_recursive(fastavro.parse_schema(item, named_schemas={})) for item in others] == [False] * 4


def test_times_are_the_numbers_that_avro_stores(registry: FakeRegistry) -> None:
    registry.add(9, schema(("at", {"type": "long", "logicalType": "timestamp-millis"})))

    class Timed(msgspec.Struct):
        at: int

    value = avro(9, schema(("at", "long")), {"at": 1_700_000_000_123})
    assert reader_of(registry, Timed).read_one(value).at == 1_700_000_000_123


@pytest.mark.parametrize(
    ("number", "text"),
    [(11, "schema 11: expected the schema of a record"), (12, "schema 12 is no Avro schema"), (13, "of kind JSON")],
)
def test_what_is_no_schema_of_a_record_is_said(registry: FakeRegistry, number: int, text: str) -> None:
    registry.add(11, "string")
    registry.add(12, {"type": "record"})
    registry.add(13, {}, kind="JSON")
    with pytest.raises(SampleError, match=text):
        reader_of(registry).read_one(b"\0" + number.to_bytes(4, "big"))


def test_records_of_one_schema_need_no_registry() -> None:
    reader = PlainAvroReader(Click, json.dumps(FIRST), "click.avsc")
    values = [first(user)[5:] for user in (1, BIG)]
    assert [event.user for event in reader.read(values)] == [1, BIG]
    assert reader.read_one(values[1]).user == BIG
    with pytest.raises(ConfigError, match=r"data.format.schema_file: click.avsc has no field price, clicked"):
        PlainAvroReader(Click, json.dumps(schema(("user", "long"))), "click.avsc")
