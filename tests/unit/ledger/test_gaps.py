"""Whether the log holds records where updates say that it holds none: all partitions are asked together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from doll.kafka.range_reader import RangeReader
from doll.ledger.audit import _present_records
from doll.ledger.balance import Range


class Log:
    """Holds records at these offsets, in each partition."""

    def __init__(self, offsets: Iterable[int]) -> None:
        self.offsets = sorted(offsets)
        self.asked: dict[bool, list[tuple[int, ...]]] = {}  # by `sparse`

    def read_together(
        self, topic: str, ranges: Sequence[tuple[int, int, int]], *, sparse: bool
    ) -> Iterator[tuple[int, int]]:
        self.asked[sparse] = [tuple(item) for item in ranges]
        for partition, lo, hi in ranges:
            yield from ((partition, offset) for offset in self.offsets if lo <= offset < hi)


def present(log: Any, *gaps: tuple[int, int, int]) -> list[Range]:
    return _present_records(cast(RangeReader, log), "t", [Range(*gap) for gap in gaps])


def test_gaps_of_all_partitions_are_asked_for_at_once_and_near_ones_as_one() -> None:
    log = Log([3, 12, 15, 90_000])
    gaps = [(7, 10, 14), (0, 2, 4), (7, 16, 20), (7, 89_999, 90_002), (999, 50, 60)]
    assert present(log, *gaps) == [Range(0, 3, 4), Range(7, 12, 13), Range(7, 90_000, 90_001)], "15 is in no gap"
    assert log.asked == {True: [(0, 2, 4), (7, 10, 20), (7, 89_999, 90_002), (999, 50, 60)], False: []}


def test_many_near_gaps_are_read_by_the_consumer_that_prefetches() -> None:
    log = Log([500, 8_050, 20_001])
    gaps = [(1, lo, lo + 1) for lo in (*range(0, 9_000, 50), 20_000)]
    assert present(log, *gaps) == [Range(1, 500, 501), Range(1, 8_050, 8_051)]
    assert log.asked == {True: [(1, 20_000, 20_001)], False: [(1, 0, 8_951)]}


def test_gaps_in_each_other_are_one() -> None:
    assert present(Log([5]), (0, 0, 10), (0, 10, 12)) == [Range(0, 5, 6)]
    assert present(Log([]), (0, 0, 10)) == []
