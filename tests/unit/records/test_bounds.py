"""Which offsets each batch of a partition covers: as its sizes add up."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from doll.records.bounds import Bounds, Cuts
from hypothesis import given
from hypothesis import strategies as st

SIZE = 5
SIZES = st.lists(st.sampled_from([5, 5, 5, 1, 3, 4]), max_size=30)


def noted(sizes: list[int], first: int = 0) -> Cuts:
    return Cuts(cuts=[(first + at, SIZE - size) for at, size in enumerate(sizes) if size < SIZE])


@given(origin=st.integers(0, 100), sizes=SIZES)
def test_each_batch_begins_where_the_one_before_ends(origin: int, sizes: list[int]) -> None:
    starts = list(accumulate(sizes, initial=origin))
    bounds = Bounds(origin, SIZE, noted(sizes))
    assert [bounds.span(batch) for batch in range(len(sizes))] == list(pairwise(starts))
    assert [bounds.lo(len(sizes) + at) for at in range(3)] == [starts[-1] + at * SIZE for at in range(3)]
    again = Bounds(origin, SIZE)
    for batch, size in enumerate(sizes):
        if size < SIZE:
            again.cut(batch, starts[batch + 1])
    assert again.cuts.within(0, len(sizes)) == bounds.cuts.within(0, len(sizes))


@given(sizes=SIZES, first=st.integers(0, 30), until=st.integers(0, 30), more=SIZES)
def test_who_knows_the_last_cuts_only_reads_the_same_batches(
    sizes: list[int], first: int, until: int, more: list[int]
) -> None:
    first, until = min(first, len(sizes)), min(until, len(sizes))
    cuts = noted(sizes)
    successor = Cuts(cuts.before(first), cuts.within(first, len(sizes)))
    at = [cuts.at(batch) for batch in range(first, len(sizes) + 3)]
    assert [successor.at(batch) for batch in range(first, len(sizes) + 3)] == at
    cuts.forget_below(first)
    assert [cuts.at(batch) for batch in range(first, len(sizes) + 3)] == at, "also where these are forgotten"
    cut = [batch for batch in range(first, len(sizes)) if sizes[batch] < SIZE]
    assert [cuts.next_cut(batch) for batch in range(first, len(sizes))] == [
        next((later for later in cut if later >= batch), None) for batch in range(first, len(sizes))
    ]
    cuts.forget_from(max(first, until))
    expected = noted(sizes[: max(first, until)] + more)
    for batch, size in enumerate(more, max(first, until)):  # decided in another way
        if size < SIZE:
            cuts.add(batch, SIZE - size)
    end = max(first, until) + len(more)
    assert [cuts.at(batch) for batch in range(first, end)] == [expected.at(batch) for batch in range(first, end)]
    assert cuts.total == expected.total


@pytest.mark.parametrize("end", [9, 10, 15, 16])
def test_a_batch_is_cut_within_itself(end: int) -> None:
    with pytest.raises(ValueError, match=f"batch 2 covers offsets 10 to 14: expected to cut within, got {end}"):
        Bounds(0, SIZE).cut(2, end)


def test_cuts_rise() -> None:
    bounds = Bounds(0, SIZE)
    bounds.cut(2, 12)
    for batch in (1, 2):
        with pytest.raises(ValueError, match="expected a later batch"):
            bounds.cuts.add(batch, 1)
    with pytest.raises(ValueError, match="expected 0 records left out or more, got -1"):
        Cuts(-1)
    with pytest.raises(ValueError, match="1 record left out or more"):
        Cuts(0, [(3, 0)])
