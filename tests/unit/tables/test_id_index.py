"""The hash table of ids gives what a dictionary gives, whatever is inserted and removed."""

from __future__ import annotations

import numpy as np
import pytest
from doll.tables.id_index import IdIndex
from doll.tables.rows import Rows, add_in_order, no_rows
from hypothesis import given
from hypothesis import strategies as st

CAPACITY = 12
ids_ = st.integers(0, 2**63 - 1) | st.integers(0, 30) | st.integers(0, 30).map(lambda number: number << 58)


@given(st.lists(st.sets(ids_, max_size=8), max_size=60))
def test_equals_a_dictionary(steps: list[set[int]]) -> None:
    index, expected, free = IdIndex(CAPACITY), dict[int, int](), set(range(CAPACITY))
    for step in steps:
        # Ids that are there are removed, the others are inserted while there is room.
        gone = sorted(step & expected.keys())
        index.remove(np.array([expected[id_] for id_ in gone], np.int64))
        free |= {expected.pop(id_) for id_ in gone}
        new = [id_ for id_ in sorted(step) if id_ not in gone][: len(free)]
        slots = [free.pop() for _ in new]
        index.insert(np.array(new, np.int64), np.array(slots, np.int64))
        expected |= dict(zip(new, slots, strict=True))
        asked = sorted(step | expected.keys())
        assert index.find(np.array(asked, np.int64)).tolist() == [expected.get(id_, -1) for id_ in asked]
        assert all(index.ids[slot] == id_ for id_, slot in expected.items())


@pytest.mark.parametrize("capacity", [1, 2, 1000])
def test_may_be_full(capacity: int) -> None:
    index = IdIndex(capacity)
    ids = np.arange(capacity, dtype=np.int64) * 64
    for _ in range(5):
        index.insert(ids, np.arange(capacity))
        np.testing.assert_array_equal(index.find(ids), np.arange(capacity))
        assert index.find(ids + 1).max() == -1
        index.remove(np.arange(capacity))
        assert index.find(ids).max() == -1


def test_rows_are_added_in_order_from_the_first_on() -> None:
    # In float32 (1 + 2^-24) + 2^-24 is 1, and 2^-24 + 2^-24 + 1 is more: the order is seen.
    small = np.float32(2**-24)
    one = Rows(np.array([1, 5]), np.array([[1.0], [3.0]], np.float32))
    twos = [Rows(np.array([0, 1]), np.array([[7.0], [small]], np.float32))] * 2
    total = add_in_order([one, *twos])
    assert total.ids.tolist() == [0, 1, 5]
    assert total.values.ravel().tolist() == [14.0, 1.0, 3.0]
    assert add_in_order([*twos, one]).values.ravel().tolist() == [14.0, float(1 + 2 * small), 3.0]
    assert add_in_order([one]) is one
    assert add_in_order([no_rows(1), one]).ids.tolist() == [1, 5]
    with pytest.raises(ValueError, match="at least one"):
        add_in_order([])
