"""A batch may be closed before it is full: whoever reads after that reads the same batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from doll.consumers.intake.batching import MIN_RANGE, BatchBuffer, PartitionBatcher, RawBatch, Value
from doll.records.bounds import Cuts
from hypothesis import given
from hypothesis import strategies as st


def batcher_of(cuts: Cuts | None = None, next_batch: int = 0, size: int = 4, origin: int = 0) -> PartitionBatcher[int]:
    return PartitionBatcher(origin=origin, records_per_batch=size, next_batch=next_batch, cuts=cuts)


def spans(batches: Sequence[RawBatch[int]]) -> list[tuple[int, int, int]]:
    return [(batch.number, batch.lo, batch.hi) for batch in batches]


def test_a_cut_batch_ends_behind_its_last_record_and_the_next_one_begins_there() -> None:
    batcher = batcher_of(origin=100)
    assert batcher.open_batch is None
    assert batcher.cut() is None, "it has no record"
    assert list(batcher.feed([100, 101], [100, 101], 3)) == []
    assert batcher.open_batch == 0
    cut = batcher.cut()
    assert cut == RawBatch(0, 0, 100, 102, [100, 101], leader_epoch=3)
    assert (batcher.open_batch, batcher.next_offset) == (None, 102)
    assert spans(list(batcher.feed(range(102, 111), list(range(102, 111))))) == [(1, 102, 106), (2, 106, 110)]


def test_offsets_without_a_record_belong_to_the_batch_that_is_cut_behind_them() -> None:
    batcher = batcher_of()
    assert list(batcher.feed([1], [1])) == []
    assert list(batcher.skip_to(3)) == []
    cut = batcher.cut()
    assert cut is not None
    assert (cut.lo, cut.hi, cut.gaps, [*cut.offsets], cut.leader_epoch) == (0, 3, [(0, 1), (2, 3)], [1], -1)
    assert list(batcher.skip_to(5)) == []
    assert batcher.cut() is None, "a batch without a record is not cut"


def test_what_is_decided_is_not_cut_in_another_way() -> None:
    batcher = batcher_of(Cuts(3, [(5, 2)], decided=7), next_batch=4)
    assert batcher.next_offset == 4 * 4 - 3
    assert list(batcher.feed([13], [13])) == []
    assert (batcher.open_batch, batcher.cut()) == (None, None)
    read = list(batcher.feed(range(14, 25), list(range(14, 25))))
    assert spans(read) == [(4, 13, 17), (5, 17, 19), (6, 19, 23)]
    assert batcher.open_batch == 7
    assert (cut := batcher.cut()) is not None
    assert spans([cut]) == [(7, 23, 25)]


def test_batches_without_a_record_come_out_as_one_in_front_of_a_decided_cut_only() -> None:
    batcher = batcher_of(Cuts(0, [(MIN_RANGE + 4, 1)], decided=MIN_RANGE + 5))
    one, *others = batcher.skip_to(4 * (2 * MIN_RANGE + 50))
    assert (one.count, one.lo, one.hi) == (MIN_RANGE + 4, 0, 4 * (MIN_RANGE + 4))
    assert spans(others)[0] == (MIN_RANGE + 4, one.hi, one.hi + 3)
    assert [batch.lo for batch in others[1:]] == [batch.hi for batch in others[:-1]]


def test_a_buffer_closes_a_batch_where_all_that_was_fed_is_in_batches() -> None:
    buffer = BatchBuffer(64)
    batcher: PartitionBatcher[Value] = PartitionBatcher(origin=0, records_per_batch=4, next_batch=0)
    assert not buffer.close(batcher)
    buffer.cut(0, batcher.feed(range(6), [b"x"] * 6))
    assert buffer.close(batcher)
    assert [(raw.number, raw.lo, raw.hi) for raw in (buffer.take(), buffer.take())] == [(0, 0, 4), (1, 4, 6)]
    assert not buffer.close(batcher)


@given(
    seed=st.integers(0, 2**32), missing=st.sets(st.integers(0, 90)), size=st.integers(2, 6), origin=st.integers(0, 9)
)
def test_any_cuts_and_crashes_give_contiguous_batches_and_the_same_where_they_are_decided(
    seed: int, missing: set[int], size: int, origin: int
) -> None:
    """Each process reads for a while, cuts now and then, and dies. What the server has decided by then, some of what
    came out, is read again and is the same; the rest may be cut in another way."""
    rng = random.Random(seed)
    log = [origin + at for at in range(91) if at not in missing]
    durable = decided = 0
    cuts = Cuts()
    known: dict[int, RawBatch[int]] = {}  # of batches that are decided
    for _ in range(8):
        cuts = Cuts(cuts.before(durable), cuts.within(durable, decided), decided=decided)
        batcher = batcher_of(cuts, next_batch=durable, size=size, origin=origin)
        read: list[RawBatch[int]] = []
        for offset in [offset for offset in log if offset >= batcher.next_offset][: rng.randrange(40)]:
            read += batcher.feed([offset], [offset])
            if rng.random() < 0.2 and (cut := batcher.cut()) is not None:
                read.append(cut)
        at = None
        for batch in read:
            assert batch.number == (durable if at is None else at[0])
            assert at is None or batch.lo == at[1], "without a hole and an overlap"
            assert 0 < batch.hi - batch.lo <= size
            assert sorted([*batch.offsets, *(o for lo, hi in batch.gaps for o in range(lo, hi))]) == list(
                range(batch.lo, batch.hi)
            )
            if batch.number < decided:
                assert batch == known[batch.number]
            at = (batch.number + 1, batch.hi)
        end = read[-1].number + 1 if read else durable
        decided = max(decided, rng.randint(durable, end))
        known |= {batch.number: batch for batch in read if batch.number < decided}
        durable = rng.randint(durable, min(decided, end))


@pytest.mark.parametrize("align", [1, 8])
def test_a_cut_takes_a_place_in_its_wave(align: int) -> None:
    batcher: PartitionBatcher[int] = PartitionBatcher(origin=0, records_per_batch=1_000, next_batch=0, align=align)
    list(batcher.feed([0], [0]))
    cut = batcher.cut()
    assert cut is not None
    assert (cut.number, cut.hi) == (0, 1)


def test_the_end_of_a_source_is_cut_once_all_before_it_is_read() -> None:
    batcher = batcher_of()
    list(batcher.feed([0, 1, 2], [0, 1, 2]))
    assert not batcher.must_flush(0)
    assert not batcher.must_flush(4), "offset 3 is to come"
    assert batcher.must_flush(3)
    assert batcher.must_flush(1), "more has come since"
    assert batcher.cut(also_gaps=True) is not None
    assert not batcher.must_flush(3)
    list(batcher.skip_to(5))
    assert batcher.must_flush(5), "a marker of a transaction: the server is to know that this is the end"
    assert batcher.cut() is None
    cut = batcher.cut(also_gaps=True)
    assert cut is not None
    assert (cut.lo, cut.hi, cut.gaps, cut.values) == (3, 5, [(3, 5)], [])
    assert batcher.cut(also_gaps=True) is None
    decided = batcher_of(Cuts(decided=1))
    list(decided.feed([0], [0]))
    assert not decided.must_flush(1)
