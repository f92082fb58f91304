"""Algorithm 1: whatever is missing, comes twice or is read again after a crash, the bounds are the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from doll.consumers.intake.batching import PartitionBatcher, RawBatch
from doll.consumers.protocol.skipped_batches import SkippedBatches, SkippedRange
from doll.ledger import offset_ranges
from doll.records.control import encode
from hypothesis import given
from hypothesis import strategies as st


def feed(batcher: PartitionBatcher[int], offsets: Sequence[int], cuts: Sequence[int] = ()) -> list[RawBatch[int]]:
    """Offsets, each its own value, in chunks: of one record each, or up to each of `cuts` and then the rest."""
    ends = {0, *(cut for cut in cuts if cut < len(offsets)), len(offsets)}
    bounds = sorted(ends) if cuts else range(len(offsets) + 1)
    return [
        batch
        for begin, end in pairwise(bounds)
        for batch in batcher.feed(compact(offsets[begin:end]), list(offsets[begin:end]))
    ]


def compact(offsets: Sequence[int]) -> Sequence[int]:
    """As a reader gives them: a range where none is missing."""
    whole = range(offsets[0], offsets[-1] + 1)
    return whole if len(whole) == len(offsets) else offsets


def check(batch: RawBatch[int], origin: int, size: int) -> None:
    """Fixed bounds; each offset is a record or in a gap, once."""
    assert (batch.lo, batch.hi) == (origin + batch.number * size, origin + (batch.number + 1) * size)
    covered = [*batch.offsets] + [o for lo, hi in batch.gaps for o in range(lo, hi)]
    assert sorted(covered) == list(range(batch.lo, batch.hi))
    assert [*batch.offsets] == sorted(batch.offsets) == batch.values
    assert all(lo < hi for lo, hi in batch.gaps)


def test_full_batches_come_out_as_soon_as_their_last_record_is_there() -> None:
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=100, records_per_batch=3, next_batch=0)
    assert feed(batcher, [100, 101]) == []
    (batch,) = feed(batcher, [102])
    assert batch == RawBatch(0, 0, 100, 103, [100, 101, 102], [])
    assert batcher.next_offset == 103


def test_a_batch_has_a_leader_epoch_that_nothing_before_its_end_exceeds() -> None:
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=4, next_batch=0)

    def feed_all(offsets: Sequence[int], leader_epoch: int) -> list[int]:
        return [batch.leader_epoch for batch in batcher.feed(offsets, list(offsets), leader_epoch)]

    assert feed_all(range(6), 2) == [2]
    assert feed_all([6], 2) == []
    assert feed_all([9, 10], 3) == [3], "the marker at its end may be of the same leader as the record behind it"
    assert [batch.leader_epoch for batch in batcher.skip_to(12)] == [-1], "the marker at its end is of any leader"
    assert feed_all(range(12, 16), -1) == [-1]
    assert feed_all(range(16, 20), 3) == [3]


def test_it_begins_at_any_batch() -> None:
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=100, records_per_batch=3, next_batch=5)
    assert batcher.next_offset == 115
    (batch,) = feed(batcher, list(range(110, 118)))
    assert (batch.number, batch.lo, batch.hi) == (5, 115, 118)


def test_a_gap_over_several_batches_gives_each_of_them() -> None:
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=4, next_batch=0)
    batches = feed(batcher, [0, 1, 14, 15])
    assert [(b.number, [*b.offsets], b.gaps) for b in batches] == [
        (0, [0, 1], [(2, 4)]),
        (1, [], [(4, 8)]),
        (2, [], [(8, 12)]),
        (3, [14, 15], [(12, 14)]),
    ]


@given(
    missing=st.sets(st.integers(0, 80)),
    length=st.integers(0, 80),
    size=st.integers(1, 9),
    start=st.integers(0, 20),
    cuts=st.lists(st.integers(0, 80), min_size=1, max_size=9),
    losses=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=3),
)
def test_how_the_stream_is_cut_into_chunks_changes_nothing(
    missing: set[int], length: int, size: int, start: int, cuts: list[int], losses: list[tuple[int, int]]
) -> None:
    log = [at for at in range(length) if at not in missing]

    def batcher() -> PartitionBatcher[int]:
        made: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=size, next_batch=start // size)
        for lo, hi in offset_ranges.union((lo, lo + span) for lo, span in losses):
            made.mark_lost(lo, hi)
        return made

    whole, one_by_one = batcher(), batcher()
    assert feed(whole, log, cuts) == feed(one_by_one, log)
    assert whole.next_offset == one_by_one.next_offset


def test_a_chunk_costs_no_call_per_record() -> None:
    """Offsets and values are looked at by index and slice only."""

    class Values(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("one by one")

    batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=1000, next_batch=0)
    lookups = 0

    class Offsets(Sequence[int]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, at: Any) -> Any:
            nonlocal lookups
            lookups += 1
            return range(100_000)[at]

    assert len(list(batcher.feed(Offsets(), Values(range(100_000))))) == 100
    assert lookups < 1000


def test_a_batch_of_no_records_is_refused() -> None:
    with pytest.raises(ValueError, match="expected records_per_batch >= 1, got 0"):
        PartitionBatcher(origin=0, records_per_batch=0, next_batch=0)


@given(
    origin=st.integers(0, 1000),
    size=st.integers(1, 7),
    missing=st.sets(st.integers(0, 80)),
    length=st.integers(0, 80),
    again=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=4),
)
def test_gaps_and_duplicates_change_no_bounds(
    origin: int, size: int, missing: set[int], length: int, again: list[tuple[int, int]]
) -> None:
    """The log with holes, in which a client rewinds now and then."""
    log = [origin + i for i in range(length) if i not in missing]
    read = list(log)
    for at, back in sorted(again, reverse=True):
        read[at:at] = read[max(0, at - back) : at]
    batches = feed(PartitionBatcher(origin=origin, records_per_batch=size, next_batch=0), read)
    assert [batch.number for batch in batches] == list(range(len(batches)))
    for batch in batches:
        check(batch, origin, size)
    assert batches == feed(PartitionBatcher(origin=origin, records_per_batch=size, next_batch=0), log)
    # All that is known to be complete is out: records of a later batch have been seen, or its own last one.
    complete = 0 if not log else (log[-1] + 1 - origin) // size
    assert len(batches) == complete


@given(
    size=st.integers(1, 5),
    missing=st.sets(st.integers(0, 60)),
    crashes=st.lists(st.integers(1, 30), max_size=5),
)
def test_crashes_and_second_readings_give_every_batch_once_and_the_same(
    size: int, missing: set[int], crashes: list[int]
) -> None:
    """Each process reads for a while and dies; the next process begins at the first batch that did not come out."""
    log = [i for i in range(61) if i not in missing]
    whole = feed(PartitionBatcher(origin=0, records_per_batch=size, next_batch=0), log)
    batches: list[RawBatch[int]] = []
    for lifetime in [*crashes, len(log) + 1]:
        batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=size, next_batch=len(batches))
        start = len(batches) * size
        batches += feed(batcher, [offset for offset in log if offset >= start][:lifetime])
    assert batches == whole


def test_what_was_deleted_before_it_was_read_is_lost_and_no_gap() -> None:
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=4, next_batch=0)
    batcher.mark_lost(5, 9)  # the position of the reader, which is ahead of what was fed
    batcher.mark_lost(9, 11)
    batches = feed(batcher, [0, 1, 3, 12, 13, 14, 15])
    assert [(b.number, [*b.offsets], b.gaps, b.lost) for b in batches] == [
        (0, [0, 1, 3], [(2, 3)], []),
        (1, [], [(4, 5)], [(5, 8)]),
        (2, [], [(11, 12)], [(8, 11)]),
        (3, [12, 13, 14, 15], [], []),
    ]
    batcher.mark_lost(10, 18)  # ahead again, in part
    (batch,) = feed(batcher, [18, 19])
    assert (batch.gaps, batch.lost) == ([], [(16, 18)])


@given(
    holes=st.sets(st.integers(0, 60)),
    losses=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=4),
    ahead=st.integers(0, 60),
)
def test_each_offset_is_a_record_a_gap_or_lost_whenever_the_loss_is_told(
    holes: set[int], losses: list[tuple[int, int]], ahead: int
) -> None:
    spans = offset_ranges.union((lo, lo + length) for lo, length in losses)
    log = [at for at in range(61) if at not in holes and not offset_ranges.contains(spans, at)]
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=5, next_batch=0)
    batches = []
    for offset in [*log, 80]:
        # The reader is ahead of what is fed by some records, so a loss is reported early, but in order.
        while spans and offset + ahead >= spans[0][0]:
            batcher.mark_lost(*spans.pop(0))
        batches += list(batcher.feed([offset], [offset]))
    missing = offset_ranges.union((lo, lo + length) for lo, length in losses)
    for batch in batches:
        lost = {o for lo, hi in batch.lost for o in range(lo, hi)}
        gaps = {o for lo, hi in batch.gaps for o in range(lo, hi)}
        read = {*batch.offsets}
        assert sorted([*lost, *gaps, *read]) == list(range(batch.lo, batch.hi))
        assert lost == {o for o in range(batch.lo, batch.hi) if offset_ranges.contains(missing, o)}


def test_a_batch_that_ends_in_a_gap_is_complete_as_soon_as_that_is_known() -> None:
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=4, next_batch=0)
    batcher.mark_lost(5, 7)
    assert feed(batcher, [0, 1, 2]) == []
    (batch,) = batcher.skip_to(4)
    assert (batch.gaps, batch.lost) == ([(3, 4)], [])
    assert list(batcher.skip_to(7)) == []
    assert list(batcher.skip_to(6)) == []
    (batch,) = feed(batcher, [4, 6, 7])  # below 7 nothing was to come
    assert ([*batch.offsets], batch.gaps, batch.lost) == ([7], [(4, 5)], [(5, 7)])


def test_a_long_hole_comes_out_as_one_and_its_ends_as_batches() -> None:
    batcher: PartitionBatcher[str] = PartitionBatcher(origin=0, records_per_batch=64, next_batch=0)
    batcher.mark_lost(100, 20_000_000)
    hole = 36_000_000
    out = [*batcher.feed([0], ["a"]), *batcher.feed(range(hole + 1, hole + 64), ["b"] * 63)]
    assert [(raw.number, raw.count, len(raw.values)) for raw in out] == [(0, 1, 1), (1, 562_499, 0), (562_500, 1, 63)]
    assert (out[1].gaps, out[1].lost) == ([(64, 100), (20_000_000, hole)], [(100, 20_000_000)])
    covered = sorted(span for raw in out for span in (*raw.gaps, *raw.lost))
    assert covered[0][0] == 1
    assert covered[-1][1] == hole + 1
    assert all(before[1] == after[0] for before, after in itertools.pairwise(covered))


def test_a_record_of_skipped_batches_is_short_whatever_the_hole_was_made_of() -> None:
    """They hold no record, so what has no record follows on: a hole is one range, and a loss one more with what is
    behind it. Losses that follow each other are one."""
    batcher: PartitionBatcher[str] = PartitionBatcher(origin=0, records_per_batch=64, next_batch=0)
    for lo in range(0, 10_000_000, 1_000):  # retention is faster than the worker
        batcher.mark_lost(lo, lo + 1_000)
    for lo in range(10_500_000, 10_520_000, 1_000):  # and then a compacted log is deleted from its beginning
        batcher.mark_lost(lo, lo + 500)
    (raw,) = [raw for raw in batcher.feed([64 * 200_000], ["a"]) if raw.count > 1]
    assert raw.lost[0] == (0, 10_000_000)
    assert (len(raw.lost), len(raw.gaps)) == (21, 21)
    skipped = SkippedBatches()
    skipped.put(SkippedRange(raw.number, raw.number + raw.count, tuple(raw.gaps), tuple(raw.lost)), 0)
    assert len(encode(skipped.record(3, 7, 5))) < 1_000


def test_a_hole_is_one_only_between_whole_waves() -> None:
    batcher: PartitionBatcher[str] = PartitionBatcher(origin=0, records_per_batch=1, next_batch=0, align=8)
    out = [*batcher.feed([0, 1003], ["a", "b"])]
    ranges = [(raw.number, raw.count) for raw in out if raw.count > 1]
    assert ranges == [(8, 992)]
    assert [raw.number for raw in out if raw.count == 1] == [*range(8), 1000, 1001, 1002, 1003]
