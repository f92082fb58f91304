"""Held-out records leave the batch after decoding: they are not learned, and only their usable samples are scored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doll import Sample, Task
from doll.config import parse
from doll.consumers.intake.batching import RawBatch
from doll.consumers.intake.dead_letters import DeadLetters, usable_samples
from doll.consumers.intake.decoding import DecodedBatch, RawRecords
from doll.consumers.intake.sample_intake import _batch
from doll.errors import SkipRecord, TaskError
from doll.records.packing import pack
from doll.records.refusals import UnreadValue
from doll.task.records import Records
from fake_message import FakeMessage
from worker_fakes import FakeChannel

pytestmark = pytest.mark.slow  # loads torch

BEGIN_MS = 1_793_491_200_000  # 1 November 2026
HELD = {102, 103, 105, 107}  # offsets of records in the time slice


class Numbers(Task):
    def decode(self, record: bytes) -> Sample:
        if record == b"skip":
            raise SkipRecord("bot")
        return Sample([float(record)], float(record))


class Keys(Numbers):
    def decode_many(self, values: Records) -> Any:
        return values.keys


def decode(
    values: list[bytes | None], task: Task | None = None, *, channel: FakeChannel | None = None, **data: Any
) -> DecodedBatch:
    """Records from offset 100 on, those of `HELD` in a time slice."""
    holdout = {"from": "2026-11-01T00:00:00Z"}
    job = {"job": "j", "task": {"class": "a:B"}, "evaluation": {"holdout": holdout}, "data": data}
    letters = DeadLetters(parse(json.dumps(job)), task or Numbers(), channel or FakeChannel(), 1, term=lambda: 1)
    messages = [
        None if isinstance(value, UnreadValue) else FakeMessage(stamp=(1, BEGIN_MS - (100 + at not in HELD)))
        for at, value in enumerate(values)
    ]
    return letters.decode(RawRecords(range(100, 100 + len(values)), values, 0, messages))


def test_held_out_samples_are_apart() -> None:
    decoded = decode([b"%d" % at for at in range(8)])
    assert decoded.y.tolist() == [0, 1, 4, 6]
    assert decoded.offsets.tolist() == [100, 101, 104, 106]
    assert decoded.held_out == (102, 103, 105, 107)
    assert decoded.held_out_samples is not None
    assert decoded.held_out_samples.y.tolist() == [2, 3, 5, 7]
    assert decoded.num_samples == 4


def test_a_batch_without_held_out_records_is_as_before() -> None:
    decoded = decode([b"0", b"1"])
    assert (decoded.held_out, decoded.held_out_samples, decoded.num_samples) == ((), None, 2)


def test_all_of_a_batch_may_be_held_out() -> None:
    decoded = decode([None, None, b"2", b"3"], tombstones="skip")
    assert (decoded.num_samples, decoded.held_out) == (0, (102, 103))
    assert decoded.skipped == (("tombstone", 2),)


def test_refused_records_are_dead_and_skipped_ones_have_no_score() -> None:
    """Offset 102 is refused, 103 skipped, 105 cannot be read, 107 is good."""
    channel = FakeChannel()
    unread = UnreadValue.with_reason("unreadable", "torn", 3)
    decoded = decode([b"0", b"1", b"?", b"skip", b"4", unread, b"6", b"7"], channel=channel)
    assert decoded.held_out == (103, 107)
    assert decoded.held_out_samples is not None
    assert decoded.held_out_samples.y.tolist() == [7]
    assert [letter.offset for letter in channel.letters] == [102, 105]
    raw = RawBatch[Any](0, 12, 100, 108, times_ms=[BEGIN_MS + at for at in range(8)])
    raw.values = [b""] * 8
    batch = _batch(raw, decoded, 1000)
    assert (batch.held_out, batch.dead, batch.num_samples) == ((103, 107), (102, 105), 4)
    assert batch.times is not None
    assert batch.times.count == 4, "freshness is that of learned records"
    assert usable_samples(batch).dead == (102, 105)


def test_a_packed_record_is_held_out_as_a_whole_and_refused_in_part() -> None:
    packed: list[bytes | None] = [pack([b"1", b"2"]), pack([b"3"]), pack([b"4", b"?"])]
    decoded = decode(packed, samples_per_record=2, batch_size=8)
    assert decoded.y.tolist() == [1, 2, 3]
    assert decoded.held_out == (102,)
    assert decoded.held_out_samples is not None
    assert decoded.held_out_samples.y.tolist() == [4]
    assert [item.whole for item in decoded.refused] == [False]


def test_a_task_that_reads_only_values_still_does() -> None:
    with pytest.raises(TaskError, match="whole_records"):
        decode([b"1", b"2"], Keys())
