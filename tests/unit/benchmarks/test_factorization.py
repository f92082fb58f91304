"""The matrix factorisation of the papers' figures: the gradient is that of the error, the entries are as described."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.paper.factorization import low_rank


def test_the_gradient_is_that_of_half_the_squared_error() -> None:
    rng = np.random.default_rng(1)
    problem = low_rank(7, 5, 2, 0.8, 0.1, rng)
    at, picked = problem.start(0.3, rng), np.array([3, 0, 9, 9, 20])  # one entry twice
    gradient, mse = problem.gradient(at, picked)
    assert mse == pytest.approx(np.mean(problem.errors(at, picked) ** 2))
    for number in range(problem.num_parameters):
        step = np.zeros_like(at)
        step[number] = 1e-6
        above, below = (0.5 * np.sum(problem.errors(at + sign * step, picked) ** 2) for sign in (1, -1))
        assert gradient[number] == pytest.approx((above - below) / 2e-6, abs=1e-6)


def test_entries_are_distinct_of_unit_variance_and_all_in_one_shard() -> None:
    problem = low_rank(300, 200, 5, 0.2, 0.1, np.random.default_rng(2))
    assert len(set(zip(problem.row.tolist(), problem.col.tolist(), strict=True))) == 12_000
    assert np.var(problem.value) == pytest.approx(1.01, rel=0.15)
    shards = problem.shards(7)
    assert sorted(np.concatenate(shards).tolist()) == list(range(12_000))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_parameters_that_have_diverged_have_an_infinite_error() -> None:
    problem = low_rank(7, 5, 2, 0.8, 0.1, np.random.default_rng(1))
    assert problem.mse(np.full(problem.num_parameters, 1e200)) == float("inf")
