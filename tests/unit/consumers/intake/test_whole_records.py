"""Keys, headers, timestamps and offsets reach the task, in bulk and one by one; records may give no sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from doll import Record, Records, RetryLater, Sample, Samples, SkipRecord, Task
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, decode_records
from doll.errors import BadRecordsError, ConfigError, TaskError
from doll.records.packing import pack
from doll.records.refusals import UnreadValue

pytestmark = pytest.mark.slow  # loads torch


@dataclass
class Message:
    """A message as the client library has it."""

    key_bytes: bytes | None = None
    header_list: list[tuple[str, bytes | None]] | None = None
    stamp: tuple[int, int] = (0, 0)

    def key(self) -> bytes | None:
        return self.key_bytes

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return self.header_list

    def timestamp(self) -> tuple[int, int]:
        return self.stamp


MESSAGES = [
    Message(b"a", [("market", b"eu"), ("market", None)], (1, 1_700_000_000_123)),
    Message(None, None, (0, -1)),
    Message(b"c", [], (2, 5)),
]


def decode(
    task: Task, values: Sequence[bytes | None], messages: Sequence[Any] = (), *, m: int = 1, skip: bool = False
) -> DecodedBatch:
    records = RawRecords(range(100, 100 + len(values)), values, 7, messages)
    return decode_records(task, records, samples_per_record=m, max_record_bytes=99, skip_tombstones=skip)


class Columns(Task):
    """Takes everything of a record, in bulk."""

    whole_records = True

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def decode(self, record: bytes) -> Sample:
        raise AssertionError("decoded one by one")

    def decode_many(self, values: Records) -> tuple[Any, Any]:
        self.seen.append(
            (values.values, values.keys, values.headers, values.timestamps_ms.tolist(), values.partition,
             values.offsets.tolist())
        )  # fmt: skip
        return np.stack([values.offsets, values.timestamps_ms], axis=1), np.array(
            [len(key or b"") for key in values.keys]
        )


def test_a_task_gets_columns_of_a_whole_batch() -> None:
    task = Columns()
    decoded = decode(task, [b"x", b"yy", b"z"], MESSAGES)
    assert task.seen == [
        (
            [b"x", b"yy", b"z"],
            [b"a", None, b"c"],
            [[("market", b"eu"), ("market", None)], (), ()],
            [1_700_000_000_123, -1, 5],
            7,
            [100, 101, 102],
        )
    ]
    assert decoded.x.tolist() == [[100, 1_700_000_000_123], [101, -1], [102, 5]]
    assert decoded.y.tolist() == [1, 0, 1]


def test_columns_leave_out_what_was_refused_unread() -> None:
    task = Columns()
    unread = UnreadValue.with_reason("too_long", "too long", 1000)
    decoded = decode(task, [None, unread, b"z"], [MESSAGES[0], None, MESSAGES[2]])
    assert task.seen == [([b"z"], [b"c"], [()], [5], 7, [102])]
    assert [(item.offset, item.code) for item in decoded.refused] == [(100, "empty"), (101, "too_long")]


def test_samples_of_a_packed_record_share_its_key() -> None:
    task = Columns()
    decode(task, [pack([b"x", b"yy"]), b"not packed", pack([b"z"])], MESSAGES, m=2)
    ((values, keys, _, _, _, offsets),) = task.seen
    assert (values, keys, offsets) == ([b"x", b"yy", b"z"], [b"a", b"a", b"c"], [100, 100, 102])


def test_columns_of_a_half_are_those_of_its_records() -> None:
    class Halves(Columns):
        def decode_many(self, values: Records) -> tuple[Any, Any]:
            if 1 in (bad := [at for at, value in enumerate(values) if value == b"yy"]):
                raise BadRecordsError(bad)
            return super().decode_many(values)

    task = Halves()
    decoded = decode(task, [b"x", b"yy", b"z"], MESSAGES)
    assert task.seen[0][1:2] + task.seen[0][5:] == ([b"a", b"c"], [100, 102])
    assert [item.offset for item in decoded.refused] == [101]


def test_records_are_a_list_that_a_task_may_consume() -> None:
    class Consuming(Task):
        def decode_many(self, values: Sequence[bytes]) -> tuple[Any, Any]:
            assert isinstance(values, list)
            x = [float(values.pop(0)) for _ in range(len(values))]
            return np.array(x), np.zeros(len(x))

    assert decode(Consuming(), [b"1", b"2"]).x.tolist() == [1, 2]


def test_a_task_that_has_not_asked_for_keys_is_told_how_to() -> None:
    class Forgetful(Task):
        def decode_many(self, values: Records) -> None:
            assert values.offsets.tolist() == [100, 101]  # these cost nothing
            values.keys  # noqa: B018

    with pytest.raises(TaskError, match=r"Records.keys: .* write `whole_records = True`"):
        decode(Forgetful(), [b"x", b"y"])


class OneByOne(Task):
    """Takes one record at a time, with all that it has."""

    def decode_record(self, record: Record) -> Sample:
        if record.value == b"skip":
            raise SkipRecord("not for us")
        return Sample([record.offset, record.timestamp_ms], len(record.key or b""))


def test_a_task_gets_single_records() -> None:
    decoded = decode(OneByOne(), [b"x", b"yy", b"z"], MESSAGES)
    assert decoded.x.tolist() == [[100, 1_700_000_000_123], [101, -1], [102, 5]]
    assert OneByOne().reads_envelopes
    assert not Task().reads_envelopes


def test_single_records_are_skipped_with_a_reason() -> None:
    decoded = decode(OneByOne(), [b"skip", b"x", b"skip"])
    assert (decoded.skipped, decoded.refused, decoded.offsets.tolist()) == ((("not for us", 2),), [], [101])


class Filtering(Task):
    """Skips what is not a number in bulk, and what is below 0."""

    input_shape = (1,)
    calls = 0

    def decode_many(self, values: Sequence[bytes]) -> Samples:
        self.calls += 1
        numbers = np.array([float(value) if value.lstrip(b"-").isdigit() else np.nan for value in values])
        words, negative = np.isnan(numbers), numbers < 0
        kept = numbers[~words & ~negative]
        return Samples(kept[:, None], kept, {"word": words, "negative or a word": negative | words})


def test_records_are_skipped_in_bulk() -> None:
    task = Filtering()
    decoded = decode(task, [b"1", b"-2", b"no", b"3", b"no"])
    assert task.calls == 1
    assert decoded.x.tolist() == [[1], [3]]
    assert decoded.offsets.tolist() == [100, 103]
    assert decoded.skipped == (("negative or a word", 1), ("word", 2))
    assert decoded.refused == []


def test_a_batch_may_be_skipped_as_a_whole() -> None:
    decoded = decode(Filtering(), [b"no"] * 3)
    assert (decoded.num_samples, decoded.skipped, decoded.refused) == (0, (("word", 3),), [])


def test_masks_of_another_shape_skip_nothing() -> None:
    class Wrong(Task):
        def decode_many(self, values: Sequence[bytes]) -> Samples:
            return Samples(np.zeros((0, 1)), np.zeros(0), {"all": np.array([0, 1])})

        def decode(self, record: bytes) -> Sample:
            return Sample([1.0], 1.0)

    decoded = decode(Wrong(), [b"x", b"y"])
    assert (decoded.num_samples, decoded.skipped) == (2, ())


def test_a_bad_sample_beside_skipped_ones_is_refused_alone() -> None:
    class Infinite(Filtering):
        def decode_many(self, values: Sequence[bytes]) -> Samples:
            x, y, skipped, *_ = super().decode_many(values)
            return Samples(np.where(x == 7, np.inf, x), y, skipped)

        def decode(self, record: bytes) -> Sample:
            return Sample([np.inf], 1.0)

    decoded = decode(Infinite(), [b"1", b"no", b"7"])
    assert (decoded.offsets.tolist(), decoded.skipped) == ([100], (("word", 1),))
    assert [(item.offset, item.reason) for item in decoded.refused] == [(102, "x holds NaN or infinity")]


@pytest.mark.parametrize("skip", [True, False])
def test_tombstones_are_refused_or_skipped(skip: bool) -> None:
    decoded = decode(Filtering(), [b"1", None, b"", b"2"], skip=skip)
    assert decoded.offsets.tolist() == [100, 103]
    assert [item.offset for item in decoded.refused] == ([102] if skip else [101, 102])
    assert decoded.skipped == ((("tombstone", 1),) if skip else ())


@pytest.mark.parametrize("error", [RetryLater("the dictionary is away"), TaskError("no"), ConfigError("wrong")])
@pytest.mark.parametrize("method", ["decode_many", "decode", "decode_block"])
def test_what_is_not_about_a_record_is_passed_on(error: Exception, method: str) -> None:
    class Failing(Task):
        pass

    def fail(*args: Any) -> Any:
        raise error

    setattr(Failing, method, fail)
    with pytest.raises(type(error), match=str(error)):
        decode(Failing(), [b"x"] * 20)
