"""Records to tensors: each refusal with its reason; the fast path and the slow one agree on everything."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from doll.consumers.intake.decoding import (
    MAX_REASON_CHARS,
    DecodedBatch,
    RawRecords,
    RefusedSamples,
    decode_records,
    refuse,
)
from doll.errors import SampleError
from doll.records.packing import pack
from doll.records.refusals import UnreadValue
from doll.task import trees
from doll.task.base import Sample, Task
from doll.task.forms import Field
from examples.synthetic.task import Gaussian
from hypothesis import given
from hypothesis import strategies as st
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch


class Points(Task):
    input_shape: tuple[int, ...] | None = (2,)
    num_classes: int | None = 3

    def decode(self, record: bytes) -> Sample:
        event = json.loads(record)
        return Sample(event["x"], event["y"])


class Anything(Points):
    input_shape = None
    num_classes = None


def point(x: Any, y: Any) -> bytes:
    return json.dumps({"x": x, "y": y}).encode()


GOOD = point([1, 2], 0)


def decode(task: Task, *values: bytes | None, m: int = 1, limit: int = 1000) -> DecodedBatch:
    records = RawRecords(range(100, 100 + len(values)), values)
    return decode_records(task, records, samples_per_record=m, max_record_bytes=limit)


def test_samples_come_out_in_stream_order_as_float32() -> None:
    decoded = decode(Points(), point([1, 2], 0), point([3.5, 4], 2))
    assert (decoded.num_samples, decoded.refused) == (2, [])
    assert decoded.x.dtype == np.float32
    np.testing.assert_array_equal(decoded.x, [[1, 2], [3.5, 4]])
    np.testing.assert_array_equal(decoded.y, [0, 2])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "empty value: expected a sample"),
        (b"", "empty value: expected a sample"),
        (b"x" * 1001, "record of 1001 bytes: expected at most 1000 (data.max_record_bytes)"),
        (b"garbage", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (b'{"x": [1, 2]}', "KeyError: 'y'"),
        (point([1], 0), "expected x of shape (2,), got (1,)"),
        (point([[1, 2]], 0), "expected x of shape (2,), got (1, 2)"),
        (point(5, 0), "expected x of shape (2,), got ()"),
        (point([1, float("nan")], 0), "x holds NaN or infinity"),
        (point([1, float("inf")], 0), "x holds NaN or infinity"),
        (point([1, 2], float("nan")), "y is NaN or infinite"),
        (point([1, 2], 3), "expected a class 0 to 2, got 3"),
        (point([1, 2], -1), "expected a class 0 to 2, got -1"),
        (point([1, 2], 1.5), "expected a class 0 to 2, got 1.5"),
        (point([1, 2], [1]), "expected a class 0 to 2, got [1]"),
        (point([1, None], 0), "expected numbers in x, got mixed or ragged values"),
        (point(["1", "2"], 0), "expected numbers in x, got values of type <U1"),
        (point([1, 2], "1"), "expected numbers in y, got values of type <U1"),
        (point([1, 2], None), "expected numbers in y, got mixed or ragged values"),
    ],
)
def test_each_refusal_has_its_reason_and_leaves_the_others_alone(value: bytes | None, reason: str) -> None:
    decoded = decode(Points(), GOOD, value, GOOD)
    (refused,) = decoded.refused
    assert (refused.offset, refused.samples, refused.whole) == (101, 1, True)
    assert refused.reason == reason
    np.testing.assert_array_equal(decoded.x, [[1, 2], [1, 2]])


def test_a_batch_of_nothing_usable_is_empty() -> None:
    for values in ((None, b"", b"?"), ()):
        decoded = decode(Points(), *values)
        assert (decoded.num_samples, len(decoded.refused)) == (0, len(values))


def test_whatever_the_users_code_raises_is_a_reason_of_bounded_length() -> None:
    class Broken(Points):
        def decode(self, record: bytes) -> Sample:
            if record == b"told":
                raise SampleError("not for me")
            raise ZeroDivisionError("x" * 10_000)

    decoded = decode(Broken(), b"a", b"told")
    assert decoded.refused[0].reason == f"ZeroDivisionError: {'x' * 10_000}"[:MAX_REASON_CHARS]
    assert decoded.refused[1].reason == "not for me"


class Panic(BaseException):
    """As pyo3 raises it where Rust code panics."""


@pytest.mark.parametrize("raised", [Panic("index out of bounds"), SystemExit(0)])
def test_what_is_no_exception_is_a_reason_too(raised: BaseException) -> None:
    class Panicking(Points):
        def decode(self, record: bytes) -> Sample:
            if record == b"bomb":
                raise raised
            return super().decode(record)

        def decode_many(self, values: Sequence[bytes]) -> Any:
            raise raised

    decoded = decode(Panicking(), GOOD, b"bomb", GOOD)
    assert decoded.num_samples == 2
    assert [(item.offset, item.reason) for item in decoded.refused] == [(101, f"{type(raised).__name__}: {raised}")]


def test_without_a_declared_shape_that_of_most_samples_is_right() -> None:
    decoded = decode(Anything(), point([1, 2], 0), point([1, 2, 3], 0), point([3, 4], 7), point([5, 6], [1, 2]))
    np.testing.assert_array_equal(decoded.x, [[1, 2], [3, 4]])
    assert [item.offset for item in decoded.refused] == [101, 103]
    assert "(3,)" in decoded.refused[0].reason


def test_packed_records() -> None:
    partly, wholly = pack([GOOD, b"?", point([1], 0)]), pack([b"?", b"??"])
    decoded = decode(Points(), pack([GOOD, GOOD]), partly, wholly, GOOD, pack([GOOD] * 5), m=4)
    assert decoded.num_samples == 3
    assert [(item.offset, item.samples, item.whole) for item in decoded.refused] == [
        (101, 2, False),
        (102, 2, True),
        (103, 1, True),
        (104, 1, True),
    ]
    assert decoded.refused[0].reason.startswith("JSONDecodeError")
    assert decoded.refused[2].reason.startswith("expected a packed record (first bytes DLPK)")
    assert decoded.refused[3].reason.startswith("expected 1 to 4 samples")


class Fast(Gaussian):
    """Counts how it is asked."""

    def __init__(self) -> None:
        super().__init__(features=2, classes=3)
        self.blocks = self.singles = 0

    def decode_block(self, block: memoryview, width: int) -> Any:
        self.blocks += 1
        return super().decode_block(block, width)

    def decode(self, record: bytes) -> Sample:
        self.singles += 1
        return super().decode(record)


class Slow(Fast):
    def decode_block(self, block: memoryview, width: int) -> Any:
        return None


def row(a: float, b: float, y: float) -> bytes:
    return struct.pack("<3f", a, b, y)


def test_good_records_of_one_width_take_the_fast_path() -> None:
    task = Fast()
    decode(task, *[row(i, 1, 2) for i in range(5)])
    decode(task, *[pack([row(i, 1, 2)] * 3) for i in range(5)], m=4)
    assert (task.blocks, task.singles) == (2, 0)


values = st.one_of(
    st.floats(-10, 10, width=32), st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.0, float("nan"), float("inf"), 1e38])
)
samples = st.one_of(
    st.builds(row, values, values, st.sampled_from([0.0, 1.0, 2.0])),
    st.builds(row, values, values, values),
    st.binary(max_size=16),
)


@given(
    st.lists(
        st.one_of(
            st.lists(samples.filter(bool), min_size=1, max_size=4).map(pack), st.none(), samples, st.just(b"x" * 2000)
        ),
        max_size=6,
    )
)
def test_the_fast_path_equals_the_slow_one_on_packed_records(records: list[bytes | None]) -> None:
    assert_equal(decode(Fast(), *records, m=3), decode(Slow(), *records, m=3))


@given(st.lists(st.one_of(samples, st.none()), max_size=8))
def test_the_fast_path_equals_the_slow_one(records: list[bytes | None]) -> None:
    one, other = decode(Fast(), *records), decode(Slow(), *records)
    assert_equal(one, other)
    assert one.num_samples + sum(item.samples for item in one.refused) == len(records)


def assert_equal(one: DecodedBatch, other: DecodedBatch) -> None:
    assert one.refused == other.refused
    assert one.num_samples == other.num_samples
    if one.num_samples:
        assert one.x.dtype == other.x.dtype
        np.testing.assert_array_equal(one.x, other.x)
        np.testing.assert_array_equal(one.y, other.y)


def test_both_paths_give_float32() -> None:
    class Double(Slow):
        def decode_block(self, block: memoryview, width: int) -> Any:
            return np.zeros((len(block) // width, 2)), np.zeros(len(block) // width, np.int64)

    task = Double()
    assert decode(task, row(0, 0, 0), row(0, 0, 0)).x.dtype == np.float32
    assert task.singles == 0


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (np.zeros((2, 2)), np.zeros(2)),  # a sample too few
        (np.zeros((3, 5)), np.zeros(3)),  # another shape
        (np.full((3, 2), np.nan), np.zeros(3)),
        (np.zeros((3, 2)), np.full(3, 7)),  # no such class
        (np.zeros((3, 2)), np.full(3, -1)),
        (np.zeros((3, 2)), np.full(3, 0.5)),
        (np.zeros((3, 2)), np.zeros((3, 1))),
        (np.full((3, 2), "a"), np.zeros(3)),
        (0.0, 1.0),
        "nonsense",
        ZeroDivisionError("inside the user's code"),
    ],
    ids=[
        "none",
        "few",
        "shape",
        "nan",
        "class",
        "negative",
        "fraction",
        "column",
        "text",
        "scalar",
        "nonsense",
        "raises",
    ],
)
def test_a_fast_path_that_is_wrong_is_not_used(answer: Any) -> None:
    class Wrong(Slow):
        def decode_block(self, block: memoryview, width: int) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    task = Wrong()
    decoded = decode(task, row(1, 2, 0), row(3, 4, 1), row(5, 6, 2))
    assert task.singles == 3
    np.testing.assert_array_equal(decoded.x, [[1, 2], [3, 4], [5, 6]])


LARGE = 16_777_217  # 2**24 + 1: float32 rounds it to its neighbour's


def test_integers_stay_integers_so_ids_do_not_collide() -> None:
    decoded = decode(Anything(), point([LARGE, 1], LARGE), point([LARGE - 1, 2], -LARGE))
    assert decoded.x.dtype == np.int64
    assert (decoded.x.tolist(), decoded.y.tolist()) == ([[LARGE, 1], [LARGE - 1, 2]], [LARGE, -LARGE])
    assert decode(Anything(), point([1, 2], 0), point([1.5, 2], 0)).x.dtype == np.float32


class Block(Anything):
    kind = "<i8"

    def decode_block(self, block: memoryview, width: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.frombuffer(bytearray(block), self.kind).reshape(-1, width // 8)
        return rows, rows[:, 0]

    def decode(self, record: bytes) -> Sample:
        row = np.frombuffer(bytearray(record), self.kind)
        return Sample(row, row[0])


@pytest.mark.parametrize("kind", ["<i8", ">i8", "<u8"])
def test_integers_in_blocks_too_in_an_order_that_torch_takes(kind: str) -> None:
    task = Block()
    task.kind = kind
    values = [np.array([LARGE + i, i], kind).tobytes() for i in range(3)]
    for decoded in (decode(task, *values), decode(task, *values, b"")):
        assert torch.from_numpy(decoded.x).tolist() == [[LARGE + i, i] for i in range(3)]
        assert torch.from_numpy(decoded.y).tolist() == [LARGE + i for i in range(3)]


def test_an_integer_that_torch_cannot_hold_is_refused() -> None:
    task = Block()
    task.kind = "<u8"
    decoded = decode(task, *(np.array([value, 0], "<u8").tobytes() for value in (1, 1 << 63)))
    [letter] = decoded.refused
    assert letter.offset == 101
    assert letter.reason.startswith(f"x: expected integers below 2**63, got {1 << 63}: Task.spec() may declare")


def test_one_sample_of_floats_does_not_round_the_ids_of_the_others() -> None:
    """A single producer may write 1.5, or 7.0, where all others write ids."""
    ids = [point([LARGE + i, i], i) for i in range(3)]
    decoded = decode(Anything(), *ids, point([7.0, 3.0], 3.0), point([1.5, 2], 0), point([1, 2], 0.5))
    assert decoded.x.dtype == np.int64
    assert decoded.x.tolist() == [[LARGE + i, i] for i in range(3)] + [[7, 3], [1, 2]]
    assert [(item.offset, item.reason) for item in decoded.refused] == [
        (104, "expected integers in x as most of the batch, got [1.5, 2.0]")
    ]
    floats = decode(Anything(), point([LARGE, 1], 0), point([LARGE - 1, 1], 0), *[point([0.5, i], 0) for i in range(3)])
    assert (floats.x.dtype, floats.num_samples) == (np.float32, 4)
    assert [item.reason for item in floats.refused] == [
        f"expected numbers that float32 holds in x as most of the batch, got [{LARGE}, 1]"
    ]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ([2**40 + 1, 3.5], f"x: expected numbers that float32 holds, got the integer {2**40 + 1} beside a fraction"),
        ([2**63 + 1, -1], f"x: expected integers of 64 bits, got {2**63 + 1}"),
        ([2**63 + 1, 1], f"x: expected integers below 2**63, got {2**63 + 1}"),
        ([2**64, 1], f"x: expected integers of 64 bits, got {2**64}"),
        (2**64, f"x: expected integers of 64 bits, got {2**64}"),
        ([2**200, 0.5], "x: expected integers of 64 bits, got 1606938044258990275541962092341162602522"),
    ],
)
def test_an_integer_in_a_list_never_becomes_another_number(x: Any, text: str) -> None:
    """numpy makes floats of them before anybody has looked."""
    decoded = decode(Anything(), point(x, 0))
    assert [item.reason.startswith(text) for item in decoded.refused] == [True], decoded.refused
    assert decode(Anything(), point([2**24, 3.5], 0)).x.tolist() == [[2**24, 3.5]], "float32 holds it"
    assert decode(Anything(), point([float(2**40 + 1), 3.5], 0)).x.tolist() == [[2**40, 3.5]], (
        "it is written as a float"
    )


def test_a_reason_that_repeats_a_record_is_one_line_of_characters_that_are_printed() -> None:
    bad = json.dumps({"x": [1], "y\u202e\ud800\n\x1b": 0}).encode()

    class Picky(Anything):
        def decode(self, record: bytes) -> Sample:
            raise ValueError(f"unknown keys {'  '.join(json.loads(record))}")

    [letter] = decode(Picky(), bad).refused
    assert letter.reason == r"ValueError: unknown keys x y\u202e\ud800 \x1b"
    [again] = refuse(decode(Anything(), GOOD), {0: "a\u202eb"})
    assert again.reason == r"a\u202eb"


class Ids(Task):
    """One integer, or more, in any form that a number may arrive in."""

    kind = "int64"

    def spec(self) -> Any:
        return {"id": Field(self.kind)}, None

    def decode(self, record: bytes) -> Sample:
        return Sample({"id": json.loads(record)}, 0)


class IdsInBulk(Ids):
    def decode_many(self, values: Any) -> Any:
        return {"id": np.array([json.loads(value) for value in values])}, np.zeros(len(values))


class AloneIds(Ids):
    def spec(self) -> Any:
        return Field(self.kind), None

    def decode(self, record: bytes) -> Sample:
        return Sample(json.loads(record), 0)


@pytest.mark.parametrize("task", [Ids(), IdsInBulk(), AloneIds()])
def test_ids_that_arrive_as_floats_are_the_same_ids_or_refused(task: Task) -> None:
    ids = [16_777_217.0, 123_456_789.0, 4_294_967_295.0, 2.0**53 - 1, -(2.0**53) + 1, 0.0]
    decoded = decode(task, *(json.dumps(value).encode() for value in ids))
    assert decoded.refused == []
    assert trees.arrays_of(decoded.x)[0].tolist() == [int(value) for value in ids]
    for value in (2.0**53, 9_007_199_254_740_993.0, 2.0**63, -(2.0**63), 1e300, 0.5, float("nan"), 2**63, 2**64):
        [letter] = decode(task, json.dumps(value).encode()).refused
        assert letter.reason.startswith(
            'x["id"]: expected int' if not isinstance(task, AloneIds) else "x: expected int"
        )


def test_a_field_of_uint64_holds_all_64_bits() -> None:
    for task in (Ids(), IdsInBulk(), AloneIds()):
        task.kind = "uint64"
        ids = [2**64 - 1, 2**63, 2**63 - 1, 0]
        decoded = decode(task, *(b"%d" % value for value in ids), b"-1", b"%d" % 2**64, b"1.5")
        assert len(decoded.refused) == 3
        (array,) = trees.arrays_of(decoded.x)
        assert (array.tolist(), array.dtype) == (ids, np.uint64)
        assert torch.from_numpy(array).view(torch.int64).tolist() == [-1, -(2**63), 2**63 - 1, 0]


def test_held_out_samples_keep_integers_too() -> None:
    x, y = stack([Sample([LARGE, 1], LARGE), Sample([LARGE - 1, 2], 0)])
    assert (x.tolist(), y.tolist()) == ([[LARGE, 1], [LARGE - 1, 2]], [LARGE, 0])
    assert stack([Sample([1, 2], 0), Sample([0.5, 2], 0)])[0].dtype == np.float32


def test_each_good_sample_knows_its_record() -> None:
    packed = [pack([point([1, k], 0) for k in range(m)]) for m in (3, 1, 2)]
    assert decode(Points(), packed[0], b"bad", *packed[1:], m=3).offsets.tolist() == [100] * 3 + [102] + [103] * 2
    assert decode(Points(), GOOD, b"bad", GOOD).offsets.tolist() == [100, 102]
    rows = [struct.pack("<3f", 1.0, 2.0, 1.0)] * 4
    fast = decode(Gaussian(2), pack(rows[:3]), pack(rows[:1]), m=3)
    assert (fast.offsets.tolist(), fast.offsets.dtype) == ([100] * 3 + [101], np.int64)


def test_samples_that_are_refused_later_are_refused_in_their_records() -> None:
    """A record without any usable sample is refused as a whole, with what was refused before."""
    half_bad = pack([GOOD, b"bad", GOOD])
    decoded = decode(Points(), half_bad, pack([GOOD] * 3), half_bad, GOOD, m=3)
    assert decoded.offsets.tolist() == [100, 100, 101, 101, 101, 102, 102]
    assert refuse(decoded, {1: "one", 0: "zero", 3: "three", 6: "six" * 1000}) == [
        RefusedSamples(100, "zero", 3, True, "harmful"),
        RefusedSamples(101, "three", 1, False, "harmful"),
        RefusedSamples(102, ("six" * 1000)[:MAX_REASON_CHARS], 1, False, "harmful"),
    ]


def test_each_refusal_has_a_code() -> None:
    decoded = decode(Points(), b"", b"x" * 1001, b"rubbish", GOOD)
    assert [item.code for item in decoded.refused] == ["empty", "too_long", "undecodable"]
    assert [item.code for item in decode(Points(), b"rubbish", m=2).refused] == ["not_packed"]
    assert [item.code for item in refuse(decoded, {0: "loss is NaN"})] == ["harmful"]


def test_what_was_not_read_is_refused_for_the_readers_reason() -> None:
    unread = UnreadValue.with_reason("unreadable", "the batch of records at offsets 5 to 6 cannot be read")
    long = UnreadValue.with_reason("too_long", "record of 9 bytes: expected at most 8", 9, b"head")
    records = RawRecords([4, 5, 6, 7, 8], [b"", unread, unread, long, None])
    decoded = decode_records(Gaussian(2), records, samples_per_record=1, max_record_bytes=8)
    assert [(item.offset, item.code, item.whole) for item in decoded.refused] == [
        (4, "empty", True), (5, "unreadable", True), (6, "unreadable", True), (7, "too_long", True), (8, "empty", True),
    ]  # fmt: skip
    assert [item.reason for item in decoded.refused][1:4] == [unread.reason, unread.reason, long.reason]
