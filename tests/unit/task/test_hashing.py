"""Hashed ids: the same in every process, different for different values and types, spread evenly."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from doll import hash_ids
from hypothesis import given
from hypothesis import strategies as st

values = st.one_of(st.none(), st.text(), st.binary(), st.integers(-(2**63), 2**64 - 1))


def test_ids_are_equal_in_every_process() -> None:
    program = "import doll; print(doll.hash_ids(['a', b'a', None, 7, -7], size=2**63).tolist())"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(hash_ids(["a", b"a", None, 7, -7], size=2**63).tolist())


@given(first=values, second=values)
def test_two_values_have_different_ids_of_63_bits(first: Any, second: Any) -> None:
    ids = hash_ids([first, second], size=2**63).tolist()
    assert (ids[0] == ids[1]) == (first == second)
    assert ids == [hash_ids([value], size=2**63).item() for value in (first, second)]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.integers(0, 2**64 - 1)))
def test_arrays_of_integers_have_the_ids_of_lists(signed: list[int], unsigned: list[int]) -> None:
    for integers, dtype in ((signed, np.int64), (unsigned, np.uint64)):
        assert hash_ids(np.array(integers, dtype), size=10**6).tolist() == hash_ids(integers, size=10**6).tolist()


def test_crossed_columns_stand_for_the_combination_in_order() -> None:
    a, b = ["x", "x", "y", "y"], [1, 2, 1, 2]
    ids = hash_ids(a, b, size=2**63)
    assert len({*ids.tolist(), *hash_ids(b, a, size=2**63).tolist(), *hash_ids(a, size=2**63).tolist()}) == 10
    assert len({*ids.tolist(), *hash_ids(a, b, size=2**63, seed=1).tolist()}) == 8


def test_ids_are_spread_evenly() -> None:
    texts = np.array([f"value {number}" for number in range(20_000)], np.object_)
    for ids in (hash_ids(texts, size=10), hash_ids(np.arange(20_000), size=10)):
        counts = np.bincount(ids, minlength=10)
        assert (
            (counts - 2000) ** 2 / 2000
        ).sum() < 28  # chi-square of 9 degrees: one set of texts in a thousand is above


def test_columns_of_lists_keep_their_shape() -> None:
    assert hash_ids(np.array([["a", "b"], ["b", "a"]]), size=100).tolist() == [
        hash_ids(["a", "b"], size=100).tolist(), hash_ids(["b", "a"], size=100).tolist(),
    ]  # fmt: skip
    assert hash_ids(np.array([], np.object_), size=100).tolist() == []


@pytest.mark.parametrize(
    ("columns", "size", "error", "words"),
    [
        ([[1.5]], 10, TypeError, "got a value of type float"),
        ([[["a"]]], 0, ValueError, "size: expected 1"),
        ([], 10, ValueError, "at least one column"),
        ([["a"]], 2**63 + 1, ValueError, "size: expected 1"),
        ([[2**64]], 10, OverflowError, "too large"),
        ([np.array([0.5])], 10, TypeError, "got a value of type float"),
    ],
)
def test_what_is_no_category_is_refused(columns: Any, size: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hash_ids(*columns, size=size)
