"""Decoding in bulk gives what decoding one by one gives, to the bit, and one bad record does not end it."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
from doll import JsonTask
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, decode_records
from doll.errors import BadRecordsError, SampleError
from doll.records.packing import pack
from doll.task.base import Sample, Task
from doll.task.fields_task import Columns
from examples.synthetic.task import Gaussian
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch


def decode(task: Task, values: Sequence[bytes | None], *, m: int = 1) -> DecodedBatch:
    return decode_records(
        task, RawRecords(range(100, 100 + len(values)), values), samples_per_record=m, max_record_bytes=9999
    )


def assert_same(one: DecodedBatch, other: DecodedBatch) -> None:
    assert one.refused == other.refused
    assert one.offsets.tolist() == other.offsets.tolist()
    assert (one.x.dtype, one.x.shape, one.y.dtype, one.y.shape) == (
        other.x.dtype,
        other.x.shape,
        other.y.dtype,
        other.y.shape,
    )
    assert (one.x.tobytes(), one.y.tobytes()) == (other.x.tobytes(), other.y.tobytes())


# --- JSON -----------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct):
    id: int
    spend: float
    parts: list[float]
    name: str = ""
    age: float | None = None
    left: bool = False


class Shop(JsonTask):
    record = Event
    input_shape: tuple[int, ...] | None = (5,)
    num_classes: int | None = 2

    def __init__(self) -> None:
        self.calls = self.singles = 0

    def samples(self, columns: Columns) -> tuple[Any, Any]:
        numbers = [columns["id"], np.log1p(columns["spend"]) / 5, np.nan_to_num(columns["age"], nan=40.0)]
        return np.column_stack([*numbers, columns["parts"]]), columns["left"]

    def decode_many(self, values: Sequence[bytes]) -> Any:
        self.calls += 1
        return super().decode_many(values)

    def decode(self, record: bytes) -> Sample | list[Sample]:
        self.singles += 1
        return super().decode(record)


class Ids(Shop):
    """Integers, of any number."""

    input_shape = None
    num_classes = None

    def samples(self, columns: Columns) -> tuple[Any, Any]:
        return columns["id"][:, None], np.floor(columns["spend"])


class Open(Shop):
    """As many parts as most records have."""

    input_shape = None
    num_classes = None


def one_by_one(task: Task) -> Task:
    """The task without its fast paths."""
    cls = type(task)

    class Slow(cls):  # type: ignore[misc, valid-type]
        decode_block = Task.decode_block
        decode_many = Task.decode_many

    slow: Task = Slow.__new__(Slow)
    vars(slow).update(vars(task))
    return slow


def event(**changes: Any) -> bytes:
    return json.dumps({"id": 7, "spend": 2.5, "parts": [0.5, 1.0], "left": True, **changes}).encode()


numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, -1.5, 2**24 + 1, 2**53 + 1, 2**63, 1e300, 0.1]),
)
good = st.builds(
    event, id=st.integers(-(2**63), 2**63 - 1), spend=st.floats(0, 1e6), left=st.booleans(),
    age=st.one_of(st.none(), st.floats(0, 99)),
)  # fmt: skip
strange = st.one_of(
    st.builds(event, id=numbers),
    st.builds(event, spend=numbers),
    st.builds(event, age=numbers),
    st.builds(event, parts=st.lists(numbers, max_size=3)),
    st.builds(event, left=st.sampled_from([0, 1, 2, None, "yes", [True]])),
    st.sampled_from(
        [
            b"",
            None,
            b"{}",
            b"[]",
            b"null",
            b"garbage",
            b"\xff",
            event() + b"\n",
            b" " + event(),
            event() + event(),
            event() + b"\n" + event(),
            event()[:-1],
            b'"x"}',
            event() + b",",
            b"{" + event(),
            b"[" * 5000,
            event(spend=float("nan")),
            event(spend=float("inf")),
            event(name="\ud800"),
            event(extra={"a": [1, {}]}),
            b'{"id":1,"id":2,"spend":1,"parts":[1,2]}',
            b'{"id":1,"spend":1e999,"parts":[1,2]}',
            b"x" * 10_000,
            event(parts=[[1], [2]]),
            event(parts=[1, None]),
            event(parts=[]),
            event(parts=[0.5, True]),
        ]
    ),
    st.binary(max_size=20),
)
batches = st.lists(st.one_of(good, good, good, strange), max_size=40)


@pytest.mark.parametrize("kind", [Shop, Ids, Open])
@given(values=batches)
def test_json_in_bulk_equals_json_one_by_one(kind: type[Shop], values: list[bytes | None]) -> None:
    assert_same(decode(kind(), values), decode(one_by_one(kind()), values))


@given(st.lists(st.lists(st.one_of(good, strange.filter(bool)), min_size=1, max_size=8), max_size=6))
def test_packed_json_in_bulk_equals_json_one_by_one(packs: list[list[bytes]]) -> None:
    values = [pack(values) for values in packs]
    assert_same(decode(Shop(), values, m=8), decode(one_by_one(Shop()), values, m=8))


def test_columns_have_the_types_of_their_fields() -> None:
    seen: list[Columns] = []

    class Watching(Shop):
        def samples(self, columns: Columns) -> tuple[Any, Any]:
            seen.append(columns)
            return super().samples(columns)

    values = [event(id=2**53 + 1, parts=[1, 2], name="a"), event(age=3)]
    decoded = decode(Watching(), values)
    assert (decoded.num_samples, len(seen)) == (2, 1)
    (columns,) = seen
    assert {name: (column.dtype, column.shape) for name, column in columns.items()} == {
        "id": (np.int64, (2,)), "spend": (np.float64, (2,)), "parts": (np.float64, (2, 2)), "name": (object, (2,)),
        "age": (np.float64, (2,)), "left": (bool, (2,)),
    }  # fmt: skip
    assert columns["id"].tolist() == [2**53 + 1, 7]
    assert math.isnan(columns["age"][0])
    assert columns["name"].tolist() == ["a", ""]


class Bounded(msgspec.Struct):
    spend: Annotated[float, msgspec.Meta(ge=0)]
    age: Annotated[float, msgspec.Meta(ge=0)] | None
    parts: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=2)]
    sizes: list[float] | None = None  # no column of numbers: None has no length


def test_a_field_with_bounds_has_the_column_of_its_type() -> None:
    class Log(JsonTask):
        record = Bounded

        def samples(self, columns: Columns) -> tuple[Any, Any]:
            assert columns["sizes"].tolist() == [None] * len(columns["spend"])
            return np.log1p([columns["spend"], columns["age"], columns["parts"][:, 1]]).T, columns["parts"][:, 0]

    good = b'{"spend": 0, "age": 1, "parts": [2, 3]}'
    decoded = decode(Log(), [good, good.replace(b"0", b"-1"), good])
    assert [item.reason for item in decoded.refused] == ["ValidationError: Expected `float` >= 0.0 - at `$.spend`"]
    assert decoded.x.tolist() == np.log1p(np.array([[0, 1, 3]] * 2)).astype(np.float32).tolist()
    assert decoded.y.dtype == np.int64
    assert decoded.y.tolist() == [2, 2]


def test_refused_json_has_its_reason() -> None:
    decoded = decode(Shop(), [event(), b'{"id": 1}', event(id="7"), event(spend=-2), event(parts=[1])])
    assert [(item.offset, item.reason) for item in decoded.refused] == [
        (101, "ValidationError: Object missing required field `spend`"),
        (102, "ValidationError: Expected `int`, got `str` - at `$.id`"),
        (103, "x holds NaN or infinity"),
        (104, "expected x of shape (5,), got (4,)"),
    ]


@pytest.mark.parametrize("bad", [b"?", event(spend=-2), event(parts=[1]), event(id=2**63)])
def test_one_bad_record_of_a_thousand_leaves_the_others_in_bulk(bad: bytes) -> None:
    for at in (0, 1, 499, 998, 999):
        values = [event(id=i) for i in range(1000)]
        values[at] = bad
        task = Shop()
        decoded = decode(task, values)
        assert [item.offset for item in decoded.refused] == [100 + at]
        assert decoded.x[:, 0].tolist() == [i for i in range(1000) if i != at]
        assert task.singles <= 8
        assert task.calls <= 16


def test_a_batch_of_bad_records_costs_few_calls() -> None:
    task = Shop()
    assert len(decode(task, [event(parts=[1])] * 1000).refused) == 1000
    assert task.calls <= 10


@pytest.mark.parametrize("m", [1, 4])
def test_a_batch_of_records_without_values_is_refused_whole_and_the_task_sees_none(m: int) -> None:
    task = Shop()
    decoded = decode(task, [None, b""] * 500, m=m)
    assert [item.offset for item in decoded.refused] == [*range(100, 1100)]
    assert len(decoded.offsets) == 0
    assert (task.calls, task.singles) == (0, 0)


# --- any decode_many ------------------------------------------------------------------------------------------------


class Lines(Task):
    """A CSV line of whole numbers, and the target; `answer` replaces what `decode_many` gives."""

    def __init__(self, answer: Any = "arrays") -> None:
        self.answer = answer
        self.singles = 0

    def decode(self, record: bytes) -> Sample:
        self.singles += 1
        cells = record.split(b",")
        return Sample([int(cell) if cell.isdigit() else float(cell) for cell in cells[:-1]], float(cells[-1]))

    def decode_many(self, values: Sequence[bytes]) -> Any:
        rows = [value.split(b",") for value in values]
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer != "arrays":
            return self.answer
        x = [[int(cell) for cell in row[:-1]] for row in rows]  # raises for what is no whole number
        return np.array(x, np.int64), np.array([float(row[-1]) for row in rows])


LARGE = 2**24 + 1  # float32 rounds it


@given(
    st.lists(
        st.one_of(
            st.sampled_from([b"%d,2,0.5" % LARGE, b"1,2,0.5", b"3,4,7"]),
            st.sampled_from(
                [
                    b"1.5,2,0",
                    b"3.0,4,0",
                    b"1,2,3,0",
                    b"1,nan,0",
                    b"1,2,nan",
                    b"1,2,",
                    b"x",
                    b"1e20,1,1",
                    b"9" * 30 + b",2,1",
                ]
            ),
        ),
        max_size=60,
    )
)
def test_integers_among_floats_are_settled_as_if_all_were_decoded_one_by_one(values: list[bytes]) -> None:
    assert_same(decode(Lines(), values), decode(one_by_one(Lines()), values))


def test_an_id_keeps_its_value_beside_a_record_of_floats() -> None:
    task = Lines()
    decoded = decode(task, [b"%d,%d,1" % (LARGE, i) for i in range(100)] + [b"1.5,2,1", b"7.0,2,1"])
    assert decoded.x.dtype == np.int64
    assert decoded.x[:, 0].tolist() == [LARGE] * 100 + [7]
    assert [item.reason for item in decoded.refused] == ["expected integers in x as most of the batch, got [1.5, 2.0]"]
    assert task.singles <= 16


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ([[1, 2]] * 20, [0.5] * 20),  # lists, whose type would depend on the batch
        (np.ones((19, 2)), np.ones(20)),
        (np.ones((20, 2)), np.ones(19)),
        (np.array(1.0), np.array(1.0)),
        (np.full((20, 2), "a"), np.ones(20)),
        (np.full((20, 2), None), np.ones(20)),
        (np.full((20, 2), 2**63, np.uint64), np.ones(20)),
        "nonsense",
        ZeroDivisionError("inside the user's code"),
        BadRecordsError(range(20)),
        BadRecordsError([]),
        BadRecordsError([-1, 20, 10**30]),
    ],
    ids=str,
)
def test_a_bulk_path_that_is_wrong_is_not_used(answer: Any) -> None:
    task = Lines(answer)
    values = [b"%d,2,0.5" % i for i in range(20)]
    decoded = decode(task, values)
    assert task.singles == 20
    assert_same(decoded, decode(one_by_one(Lines()), values))


def test_a_task_may_consume_the_list_that_it_is_given() -> None:
    class Consuming(Lines):
        def decode_many(self, values: Sequence[bytes]) -> Any:
            assert isinstance(values, list)
            taken = [values.pop() for _ in range(len(values))]
            return super().decode_many(taken[::-1])  # raises where one is bad

    values = [b"%d,2,0.5" % i for i in range(20)]
    values[3] = b"bad"
    decoded = decode(Consuming(), values)
    assert [item.offset for item in decoded.refused] == [103]
    assert_same(decoded, decode(one_by_one(Lines()), values))


def test_bad_records_that_are_named_cost_one_more_call() -> None:
    class Naming(Lines):
        calls = 0

        def decode_many(self, values: Sequence[bytes]) -> Any:
            self.calls += 1
            if bad := [at for at, value in enumerate(values) if value == b"bad"]:
                raise BadRecordsError(bad)
            return super().decode_many(values)

    rng = random.Random(0)
    values = [b"bad" if rng.random() < 0.3 else b"%d,2,1" % i for i in range(1000)]
    task = Naming()
    decoded = decode(task, values)
    assert task.calls == 2
    assert task.singles == len(decoded.refused) == values.count(b"bad")
    assert_same(decoded, decode(one_by_one(Lines()), values))


# --- decode_block ---------------------------------------------------------------------------------------------------


def row(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


class Rows(Gaussian):
    def __init__(self) -> None:
        super().__init__(features=2, classes=3)
        self.blocks: list[int] = []
        self.singles = 0

    def decode_block(self, block: memoryview, width: int) -> Any:
        self.blocks.append(len(block) // width)
        return super().decode_block(block, width)

    def decode(self, record: bytes) -> Sample:
        self.singles += 1
        return super().decode(record)


rows = st.one_of(
    st.builds(row, st.floats(-9, 9, width=32), st.just(1.0), st.sampled_from([0.0, 1.0, 2.0])),
    st.builds(row, st.floats(width=32), st.floats(width=32), st.floats(-1, 4, width=32)),
    st.builds(row, st.just(1.0)),
    st.binary(min_size=1, max_size=16),
)


@given(st.lists(st.one_of(rows, st.none(), st.just(b"")), max_size=60))
def test_blocks_equal_rows_one_by_one(values: list[bytes | None]) -> None:
    assert_same(decode(Rows(), values), decode(one_by_one(Rows()), values))


@given(st.lists(st.lists(rows, min_size=1, max_size=12).map(pack), max_size=8))
def test_packed_blocks_equal_rows_one_by_one(values: list[bytes]) -> None:
    assert_same(decode(Rows(), values, m=12), decode(one_by_one(Rows()), values, m=12))


@pytest.mark.parametrize("bad", [row(1), row(math.nan, 1, 1), row(1, 1, 7), b"", b"x" * 10_000])
@pytest.mark.parametrize("packed", [False, True])
def test_one_bad_row_of_a_thousand_leaves_the_others_in_blocks(bad: bytes, packed: bool) -> None:
    values = [row(i, 1, 2) for i in range(1000)]
    values[300] = bad
    task = Rows()
    if packed and bad:
        decoded = decode(task, [pack(values[at : at + 10]) for at in range(0, 1000, 10)], m=10)
    else:
        decoded = decode(task, values)
    assert len(decoded.refused) == 1
    assert task.singles <= 8 + 10 * packed
    assert len(task.blocks) <= 16


def test_records_of_one_width_are_one_block() -> None:
    task = Rows()
    decode(task, [row(i, 1, 2) for i in range(100)])
    decode(task, [pack([row(i, 1, 2)] * 4) for i in range(100)], m=4)
    decode(task, [*[row(i, 1, 2) for i in range(100)], b"odd"])
    assert (task.blocks, task.singles) == ([100, 400, 100], 1)


def test_a_width_that_is_not_the_tasks_costs_few_calls() -> None:
    task = Rows()
    assert len(decode(task, [row(1, 2)] * 1000).refused) == 1000
    assert len(task.blocks) <= 10


def test_what_no_block_takes_is_asked_for_in_bulk() -> None:
    class Both(Rows):
        def decode_many(self, values: Sequence[bytes]) -> Any:
            numbers = np.array([struct.unpack("<f", value)[0] for value in values])
            return np.column_stack([numbers, numbers]).astype(np.float32), np.zeros(len(values), np.int64)

        def decode(self, record: bytes) -> Sample:
            if len(record) != 4:
                return super().decode(record)
            self.singles += 1
            (number,) = struct.unpack("<f", record)
            return Sample(np.array([number, number], np.float32), 0)

    values = [row(i, 1, 2) if i % 3 else row(i) for i in range(300)] + [b"?"]
    task = Both()
    decoded = decode(task, values)
    assert decoded.x[:, 0].tolist() == list(range(300))
    assert task.singles <= 9
    assert_same(decoded, decode(one_by_one(Both()), values))


def test_offsets_and_values_are_of_one_length() -> None:
    with pytest.raises(ValueError, match="as many offsets as values"):
        decode_records(Rows(), RawRecords(range(3), [b"x"]), samples_per_record=1, max_record_bytes=10)


def test_a_task_may_get_its_bulk_path_when_it_is_made() -> None:
    task = Lines()
    slow = one_by_one(Lines())
    slow.decode_many = task.decode_many  # type: ignore[method-assign]
    assert decode(slow, [b"1,2,0"] * 20).num_samples == 20
    assert slow.singles == 0  # type: ignore[attr-defined]


def test_a_json_task_must_say_what_its_samples_are() -> None:
    class Empty(JsonTask):
        record = Event

    decoded = decode(Empty(), [event()])
    assert decoded.refused[0].reason == "NotImplementedError: Empty must define samples(columns)"
    with pytest.raises(SampleError, match="3 bad records"):
        raise BadRecordsError([1, 2, 3])
