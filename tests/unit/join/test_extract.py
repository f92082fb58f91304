"""Key, event time and label of records, and the reasons of those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from doll.config.join import JoinConfig
from doll.join.extract import Bad, Extracted, Extractor
from hypothesis import given
from hypothesis import strategies as st

WRITTEN = (1, 5)  # Kafka's timestamp


def extractor(source: int = 0, *, features: Any = None, label: Any = None) -> Extractor:
    join = JoinConfig.model_validate(
        {
            "features": {"topic": "f", "key": "id", "time": "t", **(features or {})},
            "labels": [{"topic": "l", "name": "y", "key": "id", "time": "t", **(label or {})}],
            "window_s": 10,
        }
    )
    return Extractor(join, source, max_record_bytes=200)


def test_the_object_of_features_stays_open_for_the_labels() -> None:
    assert extractor().read(b' {"id": "ab", "t": 7, "x": [1]} ', None, WRITTEN, []) == Extracted(
        b"ab", 7, b'{"id": "ab", "t": 7, "x": [1],'
    )
    empty = extractor(features={"key": {}, "time": {}}).read(b"{ }", b"k", WRITTEN, [])
    assert empty == Extracted(b"k", 5, b"{")


@pytest.mark.parametrize(
    ("unit", "given", "time_ms"),
    [
        ("s", "1790000000.5", 1_790_000_000_500), ("ms", "1790000000500", 1_790_000_000_500),
        ("us", "1790000000500000", 1_790_000_000_500), ("ns", "1790000000500000000", 1_790_000_000_500),
        ("iso8601", '"2026-09-21T16:13:20.5+02:00"', 1_790_000_000_500),
    ],
)  # fmt: skip
def test_units_of_time(unit: str, given: str, time_ms: int) -> None:
    time = {"field": "t", "unit": unit}
    value = f'{{"id": 7, "t": {given}}}'.encode()
    assert extractor(features={"time": time}).read(value, None, WRITTEN, [])[:2] == (b"7", time_ms)


def test_a_key_may_be_in_a_header() -> None:
    made = extractor(features={"key": {"header": "h"}})
    assert made.read(b'{"t": 1}', None, WRITTEN, [("h", b"a"), ("h", b"b")]).key == b"b"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"", "empty"), (None, "empty"), (b"[1]", "not_json"), (b'{"t": 1}', "not_json"), (b"{", "not_json"),
        (b'{"id": "", "t": 1}', "no_key"), (b'{"id": true, "t": 1}', "not_json"), (b'{"id": "a", "t": -1}', "no_time"),
        (b'{"id": "a", "t": 1e300}', "no_time"), (b'{"id": "a", "t": NaN}', "not_json"),
        (b'{"id": "a", "t": 1, "y": 0}', "field_taken"), (b'{"id": "a", "t": 1, "doll_labels": null}', "field_taken"),
        (b'{"id": "a", "t": 1, "x": "' + b"w" * 200 + b'"}', "too_long"), (b"[" * 150, "not_json"),
        (b'{"id": "\xff", "t": 1}', "not_json"), (b'{"id": "' + b"k" * 1100 + b'", "t": 1}', "too_long"),
    ],
)  # fmt: skip
def test_features_that_cannot_be_joined(value: bytes | None, code: str) -> None:
    with pytest.raises(Bad) as raised:
        extractor().read(value, b"k", WRITTEN, [])
    assert raised.value.code == code


def test_labels() -> None:
    amount = {"value": "v", "take": "sum", "retract": "r"}
    made = extractor(1, label=amount)
    assert made.read(b'{"id": "a", "t": 1, "v": 2.50}', None, WRITTEN, []).value == b"2.50"
    assert made.read(b'{"id": "a", "t": 1, "r": true}', None, WRITTEN, []).value == b""
    for value in (b'{"id": "a", "t": 1}', b'{"id": "a", "t": 1, "v": null}', b'{"id": "a", "t": 1, "v": "x"}'):
        with pytest.raises(Bad) as raised:
            made.read(value, None, WRITTEN, [])
        assert raised.value.code == "no_label"
    assert extractor(1, label={"value": True}).read(b'{"id": "a", "t": 1}', None, WRITTEN, []).value == b"true"


def test_a_record_without_a_value_takes_a_label_back_if_the_job_says_so() -> None:
    of_kafka = {"key": {}, "time": {}, "retract": True}
    assert extractor(1, label=of_kafka).read(None, b"a", WRITTEN, []) == Extracted(b"a", 5, b"")
    for label in ({**of_kafka, "retract": False}, {"retract": True}):
        with pytest.raises(Bad, match="no value"):
            extractor(1, label=label).read(None, b"a", WRITTEN, [])


def test_a_time_may_be_in_a_header() -> None:
    read = extractor(features={"time": {"header": "at", "unit": "s"}}).read
    assert read(b'{"id": "a"}', None, WRITTEN, [("at", b"1"), ("at", b"1800000000")]).time_ms == 1_800_000_000_000
    for headers in ([], [("at", None)], [("at", b"soon")]):
        with pytest.raises(Bad, match="header at"):
            read(b'{"id": "a"}', None, WRITTEN, headers)


PIECES = [
    b'{"id": "a", "at": 1000}',
    b'{"id":"b","at":2000.5,"x":[{},{}]}',
    b'{"id":7,"at":1,"click":1}',
    b'{"id":"c","at":3,"click":null}',
    b' {"id":"d","at":4}',
    b'{"id":"e","at":5 }',
    b'{"id":"","at":6}',
    b'{"id":"f"}',
    b'{"id":"g","at":-1}',
    b"{}",
    b"",
    None,
    b'{"id":"h","at":7}{"id":"i","at":8}',
    b'{"id":"j","at":9}\n{"id":"k","at":10}',
    b'{"id":"l","at":1,"k":[{}',
    b'{}],"id":"m","at":2}',
    b'{"id":"n","at":1,"k":"',
    b'"}',
    b'{"id":"o","at":1e999}',
    b'{"id":"p","at":1,"gone":true}',
    b'{"id":"q","at":1,"gone":0}',
    b'{"id":"\\u00e9","at":1}',
]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5), st.integers(0, 5))
def test_records_that_are_read_at_once_are_read_as_one_by_one(values: list[bytes | None], kind: int) -> None:
    """Also if a value is a part of JSON that the next value would complete."""
    fields = {"key": "id", "time": "at"}
    reader = [
        extractor(features=fields), extractor(features={"key": {}, "time": "at"}),
        extractor(features={"key": "id", "time": {}}), extractor(1, label=fields),
        extractor(1, label=fields | {"value": "click"}), extractor(1, label=fields | {"retract": "gone"}),
    ][kind]  # fmt: skip
    keys: list[bytes | None] = [b"key%d" % at for at in range(len(values))]
    at_once = reader.read_all(values, keys, [WRITTEN] * len(values))
    try:
        each = [reader.read(value, key, WRITTEN, ()) for value, key in zip(values, keys, strict=True)]
    except Bad:
        assert at_once is None
    else:
        if at_once is not None:
            assert list(zip(*at_once, strict=True)) == [tuple(item) for item in each]


def test_usual_records_are_read_at_once() -> None:
    values: list[bytes | None] = [b'{"id": "a", "at": 1000}', b'{"id": "b", "at": 2000, "x": {"y": 1}}']
    parts = extractor(features={"key": "id", "time": "at"}).read_all(values, [None, None], [WRITTEN] * 2)
    assert parts == (
        [b"a", b"b"],
        [1000, 2000],
        [b'{"id": "a", "at": 1000,', b'{"id": "b", "at": 2000, "x": {"y": 1},'],
    )
