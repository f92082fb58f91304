"""Which numbers others have changed: as a list of all changes says."""

from __future__ import annotations

import numpy as np
import pytest
from doll.ps.tables.number_changes import _MAX_AUTHORS, NOBODY, Authors, NumberChanges
from hypothesis import given
from hypothesis import strategies as st

WIDTH, START = 2, 10

changes_ = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 4), st.tuples(st.booleans(), st.booleans()), max_size=4),
        st.integers(0, 1),  # versions later
        st.integers(0, 3),  # author
    ),
    max_size=30,
)


@given(changes_, st.integers(START - 2, START + 30), st.integers(0, 4))
def test_says_what_others_have_changed(
    trace: list[tuple[dict[int, tuple[bool, bool]], int, int]], since: int, author: int
) -> None:
    numbers, version = NumberChanges(WIDTH, START), START
    expected = np.full((5, WIDTH), since < START)  # all that there is counts as changed in the version of the start
    for rows, later, who in trace:
        version += later
        slots = np.array(sorted(rows), np.int64)
        is_changed = np.array([rows[slot] for slot in sorted(rows)], np.bool_).reshape(-1, WIDTH)
        numbers.note(slots, is_changed, version, who)
        if version > since and (who != author or who == NOBODY):
            expected[slots] |= is_changed
    slots = np.arange(5)
    got = numbers.since(slots, np.full(5, since), author)
    assert got.tolist() == expected.tolist()
    arrays = (numbers._at, numbers._author, numbers._by_others)
    assert sum(array.nbytes for array in arrays) == 10 * WIDTH * len(numbers._at)


def test_a_version_beyond_32_bits_is_an_error() -> None:
    numbers = NumberChanges(1, 0)
    numbers.note(np.array([0]), np.array([[True]]), 2**32 - 1, 1)
    with pytest.raises(OverflowError):
        numbers.note(np.array([0]), np.array([[True]]), 2**32, 1)


def test_processes_have_numbers_until_there_are_too_many() -> None:
    authors = Authors()
    assert [authors.number(0, 1), authors.number(1, 1), authors.number(0, 1), authors.number(0, 2)] == [1, 2, 1, 3]
    authors._numbers = {(-1, number): number for number in range(1, _MAX_AUTHORS + 1)}
    assert authors.number(0, 1) == NOBODY
    assert authors.number(-1, 5) == 5
