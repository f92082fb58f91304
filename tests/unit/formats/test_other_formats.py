"""Protobuf, JSON Schema and CSV: types are checked, defaults filled in, and bad values named with their reasons."""

from __future__ import annotations

from typing import Any

import click_messages
import msgspec
import pytest
from click_messages import Inner
from doll.errors import BadRecordsError, ConfigError, SampleError
from doll.formats.csv_lines import CsvReader
from doll.formats.protobuf import ProtobufReader
from doll.formats.reader import FieldReader, JsonReader

BIG = 2**60 + 1
HEADER = b"\0\0\0\0\7"


class Place(msgspec.Struct):
    country: str


class Click(msgspec.Struct):
    user: int
    price: float
    clicked: bool
    tags: list[int] = []
    age: float | None = None
    place: Place | None = None


def assert_refused(reader: FieldReader, good: bytes, bad: bytes, text: str) -> None:
    """In bulk and one by one."""
    with pytest.raises(BadRecordsError) as caught:
        reader.read([good, bad, good])
    assert caught.value.positions == (1,)
    with pytest.raises(Exception, match=text):
        reader.read_one(bad)
    assert len(reader.read([good, good])) == 2


# --- Protobuf -------------------------------------------------------------------------------------------------------


def message(**fields: Any) -> bytes:
    data: bytes = click_messages.Click(**{"user": BIG, "price": 1.5, "clicked": True, **fields}).SerializeToString()
    return data


@pytest.mark.parametrize("header", [b"", HEADER + b"\0", HEADER + b"\2\0"])
def test_messages_are_decoded(header: bytes) -> None:
    reader = ProtobufReader(Click, click_messages.Click, header=bool(header))
    values = [header + message(), header + message(tags=[1, BIG], age=0.0, place=Inner(country="DE"))]
    events = [Click(BIG, 1.5, True), Click(BIG, 1.5, True, [1, BIG], 0.0, Place("DE"))]
    assert reader.read(values) == events
    assert [reader.read_one(value) for value in values] == events


def test_another_message_of_the_schema_is_refused() -> None:
    reader = ProtobufReader(Click, click_messages.Click, header=True)
    text = r"expected message \[0\] of its schema \(doll_test.Click\), got 0402000a0244450 as its index|got 040200"
    other = HEADER + b"\4\2\0" + Inner(country="DE").SerializeToString()
    assert_refused(reader, HEADER + b"\0" + message(), other, text)
    nested = ProtobufReader(Place, Inner, header=True)
    assert nested.read_one(other) == Place("DE")


def test_bytes_that_are_no_message_are_refused() -> None:
    reader = ProtobufReader(Click, click_messages.Click, header=True)
    assert_refused(reader, HEADER + b"\0" + message(), HEADER + b"\0\xff\xff", "Error parsing message")
    assert_refused(reader, HEADER + b"\0" + message(), message(), "expected the header")


def test_classes_that_do_not_suit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data.format.message: doll_test.Click has no field spend, which .* requires"
    ):
        ProtobufReader(msgspec.defstruct("Spend", [("spend", float)]), click_messages.Click, header=True)
    with pytest.raises(ConfigError, match="expected a class of Protobuf messages"):
        ProtobufReader(Click, Click, header=True)


# --- JSON Schema ----------------------------------------------------------------------------------------------------


def test_json_behind_a_header() -> None:
    reader = JsonReader(Click, has_header=True)
    good = HEADER + b'{"user": %d, "price": 1, "clicked": true}' % BIG
    assert reader.read([good, good]) == [Click(BIG, 1.0, True)] * 2
    assert_refused(reader, good, good[5:], "expected the header")
    assert_refused(reader, good, b"\0\0", "expected the header")
    assert_refused(reader, good, HEADER + b'{"user": 1}', "missing required field `price`")
    assert_refused(reader, good, HEADER + b"[" * 5000, "Expected|recursion")


# --- CSV ------------------------------------------------------------------------------------------------------------


class Line(msgspec.Struct):
    user: int
    price: float
    name: str
    age: float | None = None
    clicked: bool = False


COLUMNS = ["user", "skipped", "name", "price", "age", "clicked"]


def test_cells_become_what_the_types_of_their_fields_say() -> None:
    reader = CsvReader(Line, COLUMNS, ";")
    values = [b'%d;x;"a;b";1e3;;' % BIG, "2;;ü;0.5;40;true".encode(), b"3;;1;2;;1\r\n"]
    events = [Line(BIG, 1000.0, "a;b"), Line(2, 0.5, "ü", 40.0, True), Line(3, 2.0, "1", None, True)]
    assert reader.read(values) == events
    assert [reader.read_one(value) for value in values] == events


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"1,x,a,2,", "expected a line of 6 cells .* got 5"),
        (b"1,x,a,2,,,", "expected a line of 6 cells"),
        (b"x,x,a,2,,", "Expected `int`"),
        (b",x,a,2,,", "missing required field `user`"),
        (b'1,x,"a,2,,', "not a line of CSV|got 3"),
        (b"1,x,\xff,2,,", "invalid start byte"),
        (b"1,x,a,2,,\n1,x,a,2,,", "not a line of CSV|got 0|expected a line"),
        (b"\n", "got 0"),
    ],
)
def test_bad_lines_are_refused(line: bytes, text: str) -> None:
    assert_refused(CsvReader(Line, COLUMNS, ","), b"1,x,a,2,,", line, text)


def test_lines_whose_quotes_close_each_other_are_refused() -> None:
    reader = CsvReader(Line, COLUMNS, ",")
    values = [b'1,x,"a,2,,', b'1,x,a",2,,']
    with pytest.raises(BadRecordsError) as caught:
        reader.read(values)
    assert 0 in caught.value.positions


def test_columns_that_do_not_suit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.format.columns: expected price, name among them"):
        CsvReader(Line, ["user"], ",")
    with pytest.raises(ConfigError, match="different names"):
        CsvReader(Line, [*COLUMNS, "user"], ",")


def test_what_a_reader_says_is_one_line() -> None:
    with pytest.raises(SampleError) as caught:
        JsonReader(Click, has_header=True).read_one(b"\n\n\n\n\n\n")
    assert "\n" not in str(caught.value)
