"""Tasks on fields: the format of the job, keys and timestamps beside the columns, and records that are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from doll import Field, FieldsTask, JoinedRecord, JsonTask, Samples, Task, UInt64
from doll.config import parse
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import ConfigError, RetryLater
from doll.formats.reader import FieldReader
from doll.task.base import load_task
from doll.task.fields_task import Columns
from fake_registry import avro, fake_registry, schema

pytestmark = pytest.mark.slow  # loads torch


class Event(msgspec.Struct):
    age: float
    left: bool


class Fields(FieldsTask):
    record = Event

    def samples(self, columns: Columns) -> Any:
        return columns["age"][:, None], columns["left"]


class OfJson(JsonTask):
    record = Event
    samples = Fields.samples


class Plain(Task):
    pass


def task_of(cls: str, data: dict[str, Any] | None = None, base: Path | None = None) -> Any:
    text = {"job": "j", "task": {"class": f"{Path(__file__)}:{cls}"}, "data": data or {}}
    config = parse(json.dumps(text))
    if base is not None:
        config = config.model_copy(update={"base_folder": base})
    return load_task(config)


def decoded(task: Task, *values: bytes, envelopes: Any = ()) -> Any:
    records = RawRecords(range(len(values)), values, 0, envelopes)
    return decode_records(task, records, samples_per_record=1, max_record_bytes=9999)


def test_json_is_the_format_where_none_is_given() -> None:
    for cls in ("Fields", "OfJson"):
        result = decoded(task_of(cls), b'{"age": 3, "left": true}', b"{}")
        assert (result.x.tolist(), result.y.tolist(), len(result.refused)) == ([[3]], [True], 1)


def test_the_job_file_says_the_format(tmp_path: Path) -> None:
    csv = task_of("Fields", {"format": {"kind": "csv", "columns": ["left", "age"]}})
    assert decoded(csv, b"true,3").x.tolist() == [[3]]
    behind = task_of("Fields", {"format": {"kind": "json_schema"}})
    assert decoded(behind, b'\0\0\0\0\1{"age": 3, "left": true}').x.tolist() == [[3]]
    written = schema(("age", "float"), ("left", "boolean"))
    (tmp_path / "event.avsc").write_text(json.dumps(written))
    plain = task_of("Fields", {"format": {"kind": "avro", "schema_file": "event.avsc"}}, tmp_path)
    assert decoded(plain, avro(1, written, {"age": 3, "left": True})[5:]).x.tolist() == [[3]]


def test_a_class_of_messages_is_named_by_its_file(tmp_path: Path) -> None:
    from click_messages import Click

    (tmp_path / "click_pb2.py").write_text("from click_messages import Click\n")
    task = task_of("Clicks", {"format": {"kind": "protobuf", "message": "click_pb2.py:Click"}}, tmp_path)
    value = b"\0\0\0\0\1\0" + Click(user=7, clicked=True).SerializeToString()
    assert decoded(task, value, value).x.tolist() == [[7], [7]]
    for message in ("click_pb2.py:Clack", "nowhere:Click", "nowhere.py:Click"):
        with pytest.raises(ConfigError, match=r"nowhere|Clack"):
            task_of("Clicks", {"format": {"kind": "protobuf", "message": message}}, tmp_path)


class Click(msgspec.Struct):
    user: int
    clicked: bool


class Clicks(FieldsTask):
    record = Click

    def samples(self, columns: Columns) -> Any:
        return columns["user"][:, None], columns["clicked"]


def test_ids_of_any_size_stay_intact_and_the_registry_is_waited_for() -> None:
    written = schema(("user", "long"), ("clicked", "boolean"))
    value = avro(1, written, {"user": 2**53 + 1, "clicked": True})
    with fake_registry() as registry:
        task = task_of("Clicks", {"format": {"kind": "avro", "registry": registry.url}})
        registry.down = (502, b"")
        with pytest.raises(RetryLater):
            decoded(task, value)
        registry.down = None
        registry.add(1, written)
        result = decoded(task, value, value)
        assert result.x.tolist() == [[2**53 + 1]] * 2
        other = avro(2, written, {"user": 1, "clicked": True})
        result = decoded(task, value, other, b"{}")
        assert result.offsets.tolist() == [0]
        assert [item.reason.split(" (")[0] for item in result.refused] == [
            f"schema 2 is not in the registry at {registry.url}",
            "expected the header of a schema registry, a byte 0 and 4 bytes of a schema id, got b'{}': was the record "
            "written with a registry's serializer?",
        ]


@pytest.mark.parametrize("cls", ["OfJson", "Plain"])
def test_tasks_that_decode_values_themselves_have_no_format(cls: str) -> None:
    with pytest.raises(ConfigError, match="data.format: expected a task that subclasses doll.FieldsTask, got .*" + cls):
        task_of(cls, {"format": {"kind": "csv", "columns": ["age", "left"]}})


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"kind": "avro"}, "either registry, a URL, or schema_file"),
        ({"kind": "avro", "registry": "localhost:8081"}, "expected http://host:port"),
        ({"kind": "avro", "registry": "http://me:pw@host"}, "set DOLL_REGISTRY_USERNAME"),
        ({"kind": "avro", "registry": "http://host", "version": 1}, "version: expected subject"),
        ({"kind": "avro", "schema_file": "x.avsc", "subject": "s"}, "subject: expected registry"),
        ({"kind": "csv", "columns": []}, "columns"),
        ({"kind": "xml"}, "json_schema"),
        ({"kind": "protobuf"}, "message"),
    ],
)
def test_bad_sections_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        task_of("Fields", {"format": section})
    assert "me:pw" not in str(caught.value)


class Recent(FieldsTask):
    """Learns from records with a key that are not old."""

    record = Event
    whole_records = True

    def samples(self, columns: Columns) -> Samples:
        old = columns.records.timestamps_ms < 1000
        keyless = np.array([key is None for key in columns.records.keys])
        kept = ~(old | keyless)
        return Samples(columns["age"][kept, None], columns["left"][kept], {"old": old, "no key": keyless})


class Message:
    def __init__(self, key: bytes | None, stamp_ms: int) -> None:
        self._key, self._stamp_ms = key, stamp_ms

    def key(self) -> bytes | None:
        return self._key

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, self._stamp_ms


def test_keys_and_timestamps_are_beside_the_columns() -> None:
    values = [b'{"age": %d, "left": false}' % age for age in range(4)]
    envelopes = [Message(b"a", 2000), Message(b"b", 5), Message(None, 2000), Message(None, 5)]
    bulk = decoded(Recent(), *values, envelopes=envelopes)
    assert (bulk.x.tolist(), bulk.offsets.tolist(), bulk.skipped) == ([[0]], [0], (("old", 2), ("no key", 1)))
    single = decoded(Recent(), *values, b"{", envelopes=[*envelopes, Message(b"c", 2000)])
    assert (single.x.tolist(), single.skipped, len(single.refused)) == (bulk.x.tolist(), bulk.skipped, 1)


def test_one_by_one_gives_the_same() -> None:
    class OneByOne(Recent):
        decode_many = Task.decode_many  # type: ignore[assignment]

    values = [b'{"age": %d, "left": false}' % age for age in range(3)]
    envelopes = [Message(b"a", 2000), Message(b"b", 5), Message(None, 2000)]
    one, bulk = decoded(OneByOne(), *values, envelopes=envelopes), decoded(Recent(), *values, envelopes=envelopes)
    assert (one.x.tolist(), one.skipped) == (bulk.x.tolist(), bulk.skipped)


def test_a_reader_of_ones_own_may_be_set() -> None:
    class Fixed(FieldReader):
        def read_one(self, value: bytes) -> Event:
            return Event(len(value), True)

    task = Fields()
    task.reader = Fixed(Event)
    assert decoded(task, b"abc", b"d").x.tolist() == [[3], [1]]


class GivesNothing(Fields):
    max_samples_per_record = 0


def test_a_task_whose_records_give_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected max_samples_per_record of 1 or more, got 0"):
        task_of("GivesNothing")


class Hashed(msgspec.Struct):
    user: UInt64
    price: float
    seen: int = 0
    words: list[int] = []


class HashedIds(FieldsTask):
    record = Hashed
    num_classes = 2

    def spec(self) -> Any:
        return {"user": Field("uint64"), "price": Field("float32"), "seen": Field("int64")}, None

    def samples(self, columns: Columns) -> Any:
        return {name: columns[name] for name in ("user", "price", "seen")}, np.ones(len(columns["user"]))


def test_ids_have_all_64_bits_in_every_format() -> None:
    from click_messages import Hashed as Message

    ids = [2**64 - 1, 2**63, 2**53 + 1, 0]
    formats: dict[str, tuple[dict[str, Any], list[bytes]]] = {
        "json": ({"kind": "json"}, [b'{"user": %d, "price": 1}' % user for user in ids]),
        "csv": ({"kind": "csv", "columns": ["price", "user"]}, [b"1,%d" % user for user in ids]),
        "protobuf": (
            {"kind": "protobuf", "message": "click_messages:Hashed", "header": False},
            [Message(user=user, price=1).SerializeToString() for user in ids],
        ),
    }
    for section, values in formats.values():
        result = decoded(task_of("HashedIds", {"format": section}), *values, b"")
        assert result.x["user"].tolist() == ids, section
        assert result.x["user"].dtype == np.uint64


def test_a_number_beyond_its_type_is_refused_by_the_name_of_its_field() -> None:
    task = task_of("HashedIds")
    good = b'{"user": 1, "price": 1}'
    bad = {
        b'{"user": 18446744073709551616, "price": 1}': "user: expected an integer from 0 to 18446744073709551615, got",
        b'{"user": -1, "price": 1}': "`$.user`",
        b'{"user": 1, "price": 1, "seen": 9223372036854775808}': "seen: expected an integer from -9223372036854775808 "
        "to 9223372036854775807, got 9223372036854775808: `seen: doll.UInt64` takes 0 to 18446744073709551615",
        b'{"user": 1, "price": 1, "words": [1, 9223372036854775808]}': "words: expected an integer",
        b'{"user": 1, "price": 1e400}': "`$.price`",
        b'{"user": 1, "price": 1e39}': 'x["price"] holds NaN or infinity',
        b'{"user": 1, "price": null}': "`$.price`: if it may be missing, declare it `float | None`, which gives NaN",
    }  # fmt: skip
    for many in ([good] * 20, []):
        result = decoded(task, *bad, *many)
        assert result.num_samples == len(many)
        for item, (value, text) in zip(result.refused, bad.items(), strict=True):
            assert text in item.reason, value


def test_nan_is_refused_by_the_name_of_its_field() -> None:
    csv = task_of("HashedIds", {"format": {"kind": "csv", "columns": ["user", "price"]}})
    result = decoded(csv, b"1,nan", b"2,1", b"3,-inf")
    assert result.x["user"].tolist() == [2]
    text = "price is NaN or infinite: expected a number, or nothing in a `float | None`"
    assert [item.reason for item in result.refused] == [text] * 2


# --- values that are missing, categories that were never seen, and labels that come late ---------------------------


class Visit(JoinedRecord):
    paid: int
    age: float | None = None
    rooms: int | None = None
    country: str | None = None


class Visits(JsonTask):
    record = Visit
    targets = ("paid",)
    missing = {"age": 41.5, "rooms": 1}  # noqa: RUF012
    categories = {"country": ("CH", "DE")}  # noqa: RUF012

    def samples(self, columns: Columns) -> Any:
        x = {name: columns[name] for name in ("age", "rooms", "country")}
        return x | {"no_age": columns.missing["age"]}, columns.feedback("paid")


def test_null_and_absent_values_are_filled_in_and_marked() -> None:
    records = [
        b'{"age": 30, "rooms": 2, "paid": 1}',
        b'{"age": null, "paid": 0}',
        b'{"rooms": null, "paid": 0}',
    ]
    batch = decoded(Visits(), *records).samples
    assert batch.x["age"].tolist() == [30, 41.5, 41.5]
    assert (batch.x["rooms"].dtype, batch.x["rooms"].tolist()) == (np.int64, [2, 1, 1])
    assert batch.x["no_age"].tolist() == [False, True, True]


def test_a_category_that_was_never_seen_has_number_0() -> None:
    countries = [b'"DE"', b'"CH"', b'"XX"', b"null", b'""']
    batch = decoded(Visits(), *[b'{"paid": 1, "country": %b}' % country for country in countries]).samples
    assert (batch.x["country"].dtype, batch.x["country"].tolist()) == (np.int64, [2, 1, 0, 0, 0])


def test_a_single_record_and_a_prediction_are_prepared_as_a_batch() -> None:
    record = b'{"country": "DE", "doll_label_age_s": 5, "paid": 1}'
    sample: Any = Visits().decode(record)
    x, y = sample[:2]
    assert {name: value.item() for name, value in x.items()} == {
        "age": 41.5, "rooms": 1, "country": 2, "no_age": True,
    }  # fmt: skip
    assert {name: value.item() for name, value in y.items()} == {
        "label": 1, "age_s": 5, "is_correction": False, "replaced_label": 0,
    }  # fmt: skip
    assert Visits().decode_features(b'{"country": "CH"}')["country"].item() == 1


def test_what_the_joiner_knows_of_a_label_is_the_target() -> None:
    first = b'{"paid": 0, "doll_label_age_s": 900.5, "doll_is_correction": false, "doll_replaced_label": null}'
    correction = b'{"paid": 1, "doll_label_age_s": 86400, "doll_is_correction": true, "doll_replaced_label": 0}'
    retraction = b'{"paid": 0, "doll_label_age_s": 9e5, "doll_is_correction": true, "doll_replaced_label": 1}'
    y = decoded(Visits(), first, correction, retraction, b'{"paid": 1}').samples.y
    assert {name: array.dtype.name for name, array in y.items()} == {
        "label": "float32", "age_s": "float32", "is_correction": "bool", "replaced_label": "float32",
    }  # fmt: skip
    assert y["label"].tolist() == [0, 1, 0, 1]
    assert y["age_s"].tolist() == [900.5, 86400, 900000, 0]
    assert y["is_correction"].tolist() == [False, True, True, False]
    assert y["replaced_label"].tolist() == [0, 0, 1, 0]


def test_labels_of_other_values_are_refused_one_by_one() -> None:
    good, many = b'{"paid": 1}', b'{"paid": 2}'
    other = b'{"paid": 1, "doll_is_correction": true, "doll_replaced_label": 3}'
    done = decoded(Visits(), good, many, good, other)
    assert done.num_samples == 2
    assert [(refusal.offset, refusal.reason) for refusal in done.refused] == [
        (1, "paid: expected a label of 0 or 1, got 2, first label 0"),
        (3, "paid: expected a label of 0 or 1, got 1, first label 3"),
    ]


def test_a_field_that_the_record_lacks_is_named() -> None:
    class Other(Visits):
        missing = {"height": 1.8}  # noqa: RUF012

    with pytest.raises(ConfigError, match=r"Visit: expected fields in missing and categories, got \['height'\]"):
        Other().decode(b'{"paid": 1}')
