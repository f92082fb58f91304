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
from doll.formats.reader import FieldReader, JsonReader, UInt64

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
    with pytest.raises((SampleError, msgspec.ValidationError), match=text):
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


def test_the_field_whose_bytes_are_no_text_is_named() -> None:
    reader = ProtobufReader(Click, click_messages.Click, header=True)
    good = HEADER + b"\0" + message()
    assert_refused(reader, good, good + b"\x32\x04\x0a\x02\xff\xfe", "place: DecodeError: .*bad UTF-8")
    assert_refused(reader, good, good + b"\x08" + b"\xff" * 10 + b"\1", "the value: DecodeError")


class Visit(msgspec.Struct):
    hash: UInt64 = 5
    words: list[str] = []
    age: float | None = None
    place: Place | None = None
    before: Visit | None = None
    others: list[Visit] = []
    by_name: dict[str, Visit] = {}
    counts: dict[str, int] = {}


def test_the_rules_for_fields_hold_at_every_depth() -> None:
    """A field that is not there has the default of the record, in nested and repeated messages and behind a map."""
    old = click_messages.Visit(hash=2**64 - 1, words=["a", "b"])
    new = click_messages.Visit(age=0.0, place=Inner(), counts={"n": 2**40})
    whole = click_messages.Visit(before=old, others=[old, new], by_name={"x": new, "y": old})
    expected_old = Visit(2**64 - 1, ["a", "b"])
    expected_new = Visit(0, age=0.0, place=Place(""), counts={"n": 2**40})
    expected = Visit(
        0, before=expected_old, others=[expected_old, expected_new], by_name={"x": expected_new, "y": expected_old}
    )
    reader = ProtobufReader(Visit, click_messages.Visit, header=False)
    assert reader.read_one(whole.SerializeToString()) == expected
    assert reader.read([whole.SerializeToString(), old.SerializeToString()]) == [expected, expected_old]


class Ages(msgspec.Struct):
    age: float


class OfAges(msgspec.Struct):
    others: list[Ages] = []


def test_a_field_that_is_required_in_a_message_in_a_message_is_named_where_it_lacks() -> None:
    reader = ProtobufReader(OfAges, click_messages.Visit, header=False)
    visit = click_messages.Visit
    assert reader.read_one(visit(others=[visit(age=3)]).SerializeToString()) == OfAges([Ages(3.0)])
    with pytest.raises(msgspec.ValidationError, match=r"missing required field `age` - at `\$\.others\[1\]`"):
        reader.read_one(visit(others=[visit(age=3), visit()]).SerializeToString())
    spend: Any = msgspec.defstruct("Spend", [("spend", float)])
    with pytest.raises(ConfigError, match=r"doll_test.Visit has no field spend, which the task's Spend requires"):
        ProtobufReader(msgspec.defstruct("Deep", [("others", list[spend])]), click_messages.Visit, header=False)


def test_fields_of_messages_without_a_type_of_their_own_are_dicts() -> None:
    reader = ProtobufReader(msgspec.defstruct("Loose", [("others", list[Any])]), click_messages.Visit, header=False)
    event = reader.read_one(click_messages.Visit(others=[click_messages.Visit(hash=7)]).SerializeToString())
    assert event.others == [{"hash": 7, "words": [], "others": [], "by_name": {}, "counts": {}}]


def test_an_int_for_64_bits_without_a_sign_is_refused_before_the_start() -> None:
    """Half of all hashes would be dead letters."""
    for kind in (int, int | None, list[msgspec.defstruct("Deep", [("hash", int)])]):  # type: ignore[misc]
        name = "others" if kind not in (int, int | None) else "hash"
        with pytest.raises(ConfigError, match=r"doll_test.Visit.hash has 64 bits.*expected `hash: doll.UInt64`"):
            ProtobufReader(msgspec.defstruct("R", [(name, kind)]), click_messages.Visit, header=False)


# --- JSON Schema ----------------------------------------------------------------------------------------------------


def test_json_behind_a_header() -> None:
    reader = JsonReader(Click, has_header=True)
    good = HEADER + b'{"user": %d, "price": 1, "clicked": true}' % BIG
    assert reader.read([good, good]) == [Click(BIG, 1.0, True)] * 2
    assert_refused(reader, good, good[5:], "expected the header")
    assert_refused(reader, good, b"\0\0", "expected the header")
    assert_refused(reader, good, HEADER + b'{"user": 1}', "missing required field `price`")
    assert_refused(reader, good, HEADER + b"[" * 5000, "Expected|recursion")


class Named(msgspec.Struct):
    user: int
    name: str = ""
    more: Any = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'{"user": 1, "name": "\xff\xfe"}', "^name: UnicodeDecodeError"),
        (b'{"user": 1, "more": {"name": "\xff"}}', "^more: UnicodeDecodeError"),
        (b'{"user": 1, "name": "\\ud800"}', "^name: DecodeError"),
        (b'{"user": 1, "more": %s}' % (b"[" * 100_000), "^more: RecursionError"),
        (b'{"user": 1, "other": %s1%s}' % (b"[" * 5000, b"]" * 5000), "^other: RecursionError"),
        (b'{"user": 1, "more": %s' % (b'{"user":' * 100_000), "^more: RecursionError"),
        (b'{"name": "a\\"b", "user": 1, "more": [1, 2', "^more: DecodeError: Input data was truncated"),
        (b'{"user": 1, "name": "' + b'\\"' * 100_000, "^name: DecodeError: Input data was truncated"),
        (b'{"user": 1, "name": 3}', r"Expected `str`, got `int` - at `\$.name`"),
        (b'{"user": 1e400}', r"Number out of range - at `\$.user`"),
        (b"\xff\xfe", "^the value: DecodeError"),
        (b"\xef\xbb\xbf{}", "^the value: DecodeError"),
    ],
)
def test_bad_json_is_refused_by_the_name_of_its_field(value: bytes, text: str) -> None:
    assert_refused(JsonReader(Named), b'{"user": 1}', value, text)


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
        (b"x,x,a,2,,", r"Expected `int`, got `str` - at `\$.user`, in the cell 'x'"),
        (b"1,x,a,2 \xe2\x80\xae,,", r"at `\$.price`, in the cell '2 \?'"),
        (
            b"9007199254740993.0,x,a,2,,",
            "user: expected an integer, got 9007199254740993.0, which may have been another",
        ),
        (b"1e300,x,a,2,,", "user: expected an integer, got 1e300"),
        (b"1,x,a,1e400,,", r"out of range - at `\$.price`, in the cell '1e400'"),
        (b",x,a,2,,", "missing required field `user`"),
        (b'1,x,"a,2,,', "not a line of CSV|got 3"),
        (b"1,x,\xff,2,,", "^name: expected UTF-8, got .* invalid start byte"),
        (b"1,x,a,2,,\n1,x,a,2,,", "not a line of CSV|got 0|expected a line"),
        (b"\n", "got 0"),
    ],
)
def test_bad_lines_are_refused(line: bytes, text: str) -> None:
    assert_refused(CsvReader(Line, COLUMNS, ","), b"1,x,a,2,,", line, text)


def test_a_cell_may_be_as_long_as_a_record_and_an_integer_have_a_fraction_of_0() -> None:
    reader = CsvReader(Line, COLUMNS, ",")
    assert len(reader.read_one(b"9007199254740991.0,," + b"n" * 300_000 + b",2,,").name) == 300_000
    values = [b"9007199254740991.0,,n,2,,", b"-9223372036854775808,,n,2,,", b"18446744073709551615,,n,2,,"]
    assert [event.user for event in reader.read(values)] == [2**53 - 1, -(2**63), 2**64 - 1]


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
