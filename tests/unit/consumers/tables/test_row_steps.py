"""A worker's steps on rows are those of the server's optimizer, with state for the rows that it has used."""

from __future__ import annotations

import numpy as np
import pytest
from doll.consumers.tables.row_cache import FetchedRows, RowCache
from doll.consumers.tables.row_steps import RowSteps, state_row_bytes
from doll.errors import TaskError
from doll.optim.row_optimizer import Decayed, LazyAdam, RowAdagrad, RowOptimizer, RowSgd, RowwiseAdagrad
from doll.ps.tables.store import Table
from doll.storage.sections import RowRequest
from doll.tables.rows import Floats, Rows, TableShape

pytestmark = pytest.mark.slow  # loads torch

NUM_ROWS, WIDTH = 20_000, 2


@pytest.mark.parametrize(
    "optimizer",
    [RowSgd(0.3), RowAdagrad(0.1), LazyAdam(0.01), RowwiseAdagrad(0.1), Decayed(RowwiseAdagrad(0.1, 0.5), 0.99)],
    ids=lambda each: str(each),
)
def test_steps_of_one_worker_make_the_server_s_table(optimizer: RowOptimizer) -> None:
    rng = np.random.default_rng(2)
    initial = rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    reference, adder = Table("embed", initial.copy(), optimizer), Table("embed", initial.copy(), None)
    cache, steps = RowCache(TableShape(NUM_ROWS, WIDTH), 100_000), RowSteps(WIDTH, optimizer)

    def fetch(request: RowRequest) -> FetchedRows:
        return FetchedRows(adder.answer(request).rows, batch, batch)

    for batch in range(30):
        ids = np.unique(rng.integers(0, NUM_ROWS, 300))
        gradient = Rows(ids, rng.standard_normal((len(ids), WIDTH)).astype(np.float32))
        rows = cache.get(ids, batch, fetch)
        before = rows.copy()
        change = steps.step(rows, gradient, 0.25)
        assert rows.tobytes() == before.tobytes(), "the caller's rows stay"
        cache.own.inc(change)
        adder.add(cache.own.close(batch))
        adder.apply(1.0, batch + 1)
        reference.add(gradient)
        reference.apply(0.25, batch + 1)
        np.testing.assert_allclose(adder.read(ids).values, reference.read(ids).values, rtol=1e-5, atol=1e-6)
    everything = np.arange(NUM_ROWS)
    np.testing.assert_allclose(adder.read(everything).values, reference.read(everything).values, rtol=1e-5, atol=1e-6)
    assert len(reference._touched) > 1024
    assert len(steps) == (len(reference._touched) if optimizer.state_names else 0), "it has grown"


def gradient_of(*ids: int, value: float = 1.0) -> Rows:
    return Rows(np.array(ids, np.int64), np.full((len(ids), WIDTH), value, np.float32))


def change(steps: RowSteps, *ids: int, value: float = 1.0) -> Floats:
    """What a step changes in rows of zeros."""
    return steps.step(np.zeros((len(ids), WIDTH), np.float32), gradient_of(*ids, value=value), 1.0).values


@pytest.mark.parametrize(
    "optimizer", [RowAdagrad(0.1), LazyAdam(0.01), RowwiseAdagrad(0.1)], ids=lambda each: str(each)
)
@pytest.mark.parametrize("max_bytes", [50_000, 500_000])
def test_the_state_keeps_to_its_bound_whatever_rows_come(optimizer: RowOptimizer, max_bytes: int) -> None:
    """Rows that still have their state step as without a bound; others as at their first gradient."""
    rng = np.random.default_rng(3)
    bounded, free = RowSteps(WIDTH, optimizer, max_bytes), RowSteps(WIDTH, optimizer)
    capacity = max_bytes // state_row_bytes(optimizer, WIDTH)
    for _ in range(200):
        ids = np.unique(np.minimum(rng.exponential(3000, 300).astype(np.int64), NUM_ROWS - 1))
        gradient = Rows(ids, rng.standard_normal((len(ids), WIDTH)).astype(np.float32))
        rows = rng.standard_normal((len(ids), WIDTH)).astype(np.float32)
        before = bounded.num_evicted
        steps = [each.step(rows, gradient, 1.0).values for each in (bounded, free)]
        assert bounded.num_bytes <= max_bytes
        assert len(bounded) <= capacity
        if not before and not bounded.num_evicted:
            np.testing.assert_array_equal(steps[0], steps[1])
    assert (bounded.num_evicted > 0) == (len(free) > capacity)
    assert len(bounded) == len(free) or len(bounded) > capacity // 2


def test_the_rows_whose_last_gradient_is_the_longest_ago_lose_their_state() -> None:
    steps = RowSteps(WIDTH, RowAdagrad(0.1), 4 * state_row_bytes(RowAdagrad(0.1), WIDTH))
    first = change(steps, 1)
    change(steps, 2)
    change(steps, 3)
    change(steps, 4)
    second = change(steps, 1)
    assert (np.abs(second) < np.abs(first)).all(), "its sum of squares has grown"
    change(steps, 5)
    assert (len(steps), steps.num_evicted) == (4, 1)
    assert (np.abs(change(steps, 1)) < np.abs(second)).all(), "it was used since"
    np.testing.assert_array_equal(change(steps, 2), first)


def test_a_batch_of_more_rows_than_have_room_is_refused_and_says_what_to_set() -> None:
    """Otherwise the state would be lost within each step, and the optimizer would be a different one."""
    steps = RowSteps(WIDTH, LazyAdam(0.1), 4 * state_row_bytes(LazyAdam(0.1), WIDTH))
    change(steps, 1, 2, 3, 4)
    with pytest.raises(TaskError, match=r"6 rows .* worker.row_cache_bytes .* of 4: set it to 1.5 times"):
        change(steps, 1, 2, 3, 4, 5, 6)
    assert len(change(RowSteps(WIDTH, RowSgd(0.1), 1), *range(1000))) == 1000, "no state"
