"""The largest of several columns: named if it is larger by more than noise, and hardly ever named if none is."""

from __future__ import annotations

import numpy as np
import pytest
from doll.theory.comparison import Largest, certain_largest, t_factor
from hypothesis import given
from hypothesis import strategies as st

LOOKS = 1000


def losses(
    rng: np.random.Generator, *, worse: float = 0.0, rows: int = 48, columns: int = 6, memory: float = 0.0,
    equals: int = 1,
) -> np.ndarray:  # fmt: skip
    """Losses of replicas on the same samples, the last ones (`equals`) `worse` than the others: samples make a
    difference of 10 %, the replica itself one of 0.014 %, of which `memory` remains from one row to the next."""
    own = rng.normal(size=(rows, columns))
    for row in range(1, rows):
        own[row] = memory * own[row - 1] + (1 - memory**2) ** 0.5 * own[row]
    values = 1 + 0.1 * rng.normal(size=(rows, 1)) + 1.4e-4 * own
    values[:, columns - equals :] += worse
    return np.asarray(values)


def share(rng: np.random.Generator, **more: float) -> tuple[float, float]:
    """In how many looks a column is named, and in how many it is the last one."""
    looks = [certain_largest(losses(rng, **more)) for _ in range(LOOKS)]  # type: ignore[arg-type]
    columns = [largest.column for largest in looks if largest is not None]
    return len(columns) / LOOKS, columns.count(5) / LOOKS


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_a_column_that_is_larger_is_named_and_none_is_if_all_are_equal(memory: float) -> None:
    rng = np.random.default_rng(0)
    assert share(rng, memory=memory)[0] <= 0.05
    assert share(rng, memory=memory, worse=3e-4)[1] >= 0.95


@pytest.mark.parametrize("columns", [2, 3, 6, 24])
def test_a_column_with_an_equal_is_hardly_ever_named_however_many_there_are(columns: int) -> None:
    rng = np.random.default_rng(2)
    most = 0.05 + 3 * (0.05 * 0.95 / LOOKS) ** 0.5  # three standard errors of the share
    assert share(rng, columns=columns)[0] <= most
    assert share(rng, columns=columns, worse=1e-2, equals=2)[0] <= most


def test_without_pairs_the_difference_would_drown_in_that_of_the_samples() -> None:
    rng = np.random.default_rng(1)
    named = 0
    for _ in range(LOOKS):
        values = losses(rng, worse=3e-4)
        named += certain_largest(np.stack([rng.permutation(column) for column in values.T], axis=1)) is not None
    assert named / LOOKS <= 0.05


@given(st.integers(0, 2**32), st.permutations(range(6)), st.floats(-3, 3))
def test_neither_the_order_of_the_columns_nor_what_a_row_has_in_common_counts(
    seed: int, order: list[int], common: float
) -> None:
    rng = np.random.default_rng(seed)
    values = losses(rng, worse=2e-4)
    named = certain_largest(values)
    other = certain_largest(values[:, order] + common * rng.normal(size=(len(values), 1)))
    assert (named is None) == (other is None)
    if named is not None and other is not None:
        assert order[other.column] == named.column
        assert other[1:] == pytest.approx(named[1:], rel=1e-6)


def test_what_it_says() -> None:
    values = np.tile([1.0, 3.0, 2.5], (24, 1))
    assert certain_largest(values) == Largest(1, 0.5, 0.0)
    assert certain_largest(np.vstack([np.full((3, 3), 9.0), values])) == Largest(1, 0.5, 0.0), "the newest blocks"
    assert certain_largest(values[:23]) is None, "too few rows"
    assert certain_largest(values[:, :1]) is None
    assert certain_largest(np.ones((24, 3))) is None, "equal to the bit"
    assert certain_largest(np.empty((0, 3))) is None


def test_the_quantile_is_that_of_student() -> None:
    stdtrit = pytest.importorskip("scipy.special").stdtrit
    for count in (2, 3, 11, 12, 13, 31, 1000):
        assert t_factor(count) == pytest.approx(stdtrit(count - 1, 0.975), rel=1e-4)
    assert np.isnan(t_factor(1))
