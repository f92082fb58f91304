"""Sets of offsets as sorted lists of half-open ranges [lo, hi)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of `spans`, which may have any order. The result is sorted and disjoint, and its ranges do not
    touch.

    >>> union([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)])
    [(0, 3), (5, 9)]
    """
    merged: list[Span] = []
    for lo, hi in sorted(spans):
        if lo >= hi:
            continue
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged


def overlaps(spans: Iterable[Span]) -> list[Span]:
    """Return the ranges that at least two of `spans` cover.

    >>> overlaps([(0, 4), (3, 6), (3, 5), (8, 9), (8, 9)])
    [(3, 5), (8, 9)]
    """
    twice: list[Span] = []
    reached: int | None = None
    for lo, hi in sorted(spans):
        if lo >= hi:
            continue
        if reached is not None and lo < reached:
            twice.append((lo, min(hi, reached)))
        reached = hi if reached is None else max(reached, hi)
    return union(twice)


def subtract(spans: Sequence[Span], less: Sequence[Span]) -> list[Span]:
    """Return `spans` without `less`. Both have the form that `union` returns.

    >>> subtract([(0, 10), (20, 30)], [(3, 5), (8, 22), (29, 40)])
    [(0, 3), (5, 8), (22, 29)]
    """
    rest: list[Span] = []
    at = 0
    for lo, hi in spans:
        while at < len(less) and less[at][1] <= lo:
            at += 1
        k = at
        while k < len(less) and less[k][0] < hi:
            if lo < less[k][0]:
                rest.append((lo, less[k][0]))
            lo = max(lo, less[k][1])
            k += 1
        if lo < hi:
            rest.append((lo, hi))
    return rest


def intersect(spans: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the ranges that both `spans` and `other` cover. Both have the form that `union` returns.

    >>> intersect([(0, 10), (20, 30)], [(5, 25)])
    [(5, 10), (20, 25)]
    """
    return subtract(spans, subtract(spans, other))


def points(offsets: Iterable[int]) -> list[Span]:
    """Return the set of single `offsets` as ranges.

    >>> points([4, 2, 3, 9, 3])
    [(2, 5), (9, 10)]
    """
    return union((offset, offset + 1) for offset in offsets)


def contains(spans: Sequence[Span], offset: int) -> bool:
    """Return whether `spans` cover `offset`. `spans` has the form that `union` returns.

    >>> [contains([(2, 5), (9, 10)], offset) for offset in (1, 2, 4, 5, 9)]
    [False, True, True, False, True]
    """
    at = bisect_right(spans, offset, key=lambda span: span[0])
    return at > 0 and offset < spans[at - 1][1]


def size(spans: Iterable[Span]) -> int:
    """Return the number of offsets in disjoint `spans`."""
    return sum(hi - lo for lo, hi in spans)
