"""A worker's steps on rows are those of the server's optimizer, with state for the rows that it has used."""

from __future__ import annotations

import numpy as np
import pytest
from doll.consumers.row_cache import FetchedRows, RowCache
from doll.consumers.row_steps import RowSteps
from doll.optim.row_optimizer import LazyAdam, RowAdagrad, RowOptimizer, RowSgd
from doll.ps.tables.store import Table
from doll.rows import Rows, TableShape
from doll.storage.sections import RowRequest

NUM_ROWS, WIDTH = 20_000, 2


@pytest.mark.parametrize("optimizer", [RowSgd(0.3), RowAdagrad(0.1), LazyAdam(0.01)], ids=lambda each: str(each))
def test_steps_of_one_worker_make_the_server_s_table(optimizer: RowOptimizer) -> None:
    rng = np.random.default_rng(2)
    initial = rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    reference, adder = Table("embed", initial.copy(), optimizer), Table("embed", initial.copy(), None)
    cache, steps = RowCache(TableShape(NUM_ROWS, WIDTH), 100_000), RowSteps(WIDTH, optimizer)

    def fetch(request: RowRequest) -> FetchedRows:
        return FetchedRows(adder.answer(request), batch, batch)

    for batch in range(30):
        ids = np.unique(rng.integers(0, NUM_ROWS, 300))
        gradient = Rows(ids, rng.standard_normal((len(ids), WIDTH)).astype(np.float32))
        rows = cache.get(ids, batch, fetch)
        before = rows.copy()
        change = steps.step(rows, gradient, 0.25)
        assert rows.tobytes() == before.tobytes(), "the caller's rows stay"
        cache.inc(change)
        adder.add(cache.own.close(batch))
        adder.apply(1.0, batch + 1)
        reference.add(gradient)
        reference.apply(0.25, batch + 1)
        np.testing.assert_allclose(adder.read(ids).values, reference.read(ids).values, rtol=1e-5, atol=1e-6)
    everything = np.arange(NUM_ROWS)
    np.testing.assert_allclose(adder.read(everything).values, reference.read(everything).values, rtol=1e-5, atol=1e-6)
    assert len(steps) == reference.num_touched > 1024, "it has grown"
