"""Ranges of offsets against sets of offsets."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from doll.ledger import offset_ranges
from hypothesis import given
from hypothesis import strategies as st

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ab: (min(ab), max(ab))), max_size=8)


def offsets(spans: list[offset_ranges.Span]) -> Counter[int]:
    return Counter(offset for lo, hi in spans for offset in range(lo, hi))


@given(SPANS, SPANS)
def test_offset_ranges_agree_with_sets(a: list[offset_ranges.Span], b: list[offset_ranges.Span]) -> None:
    one, other = offset_ranges.union(a), offset_ranges.union(b)
    assert set(offsets(one)) == set(offsets(a))
    assert all(hi < lo for (_, hi), (lo, _) in pairwise(one))
    assert set(offsets(offset_ranges.overlaps(a))) == {offset for offset, times in offsets(a).items() if times > 1}
    assert set(offsets(offset_ranges.subtract(one, other))) == set(offsets(one)) - set(offsets(other))
    assert set(offsets(offset_ranges.intersect(one, other))) == set(offsets(one)) & set(offsets(other))
    assert offset_ranges.points(offsets(a)) == one
    assert offset_ranges.size(one) == len(offsets(one))
