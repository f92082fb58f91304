"""A worker's rows of tables and their optimizer's state keep to `worker.row_cache_bytes` together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import record_builders
from doll.config import parse
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import WorkerTables
from doll.optim.row_optimizer import LazyAdam, RowAdagrad, RowOptimizer, RowSgd
from doll.records.control import GetRows, RowsStored
from doll.storage.blobs import rows_key
from doll.storage.sections import decode_row_request, encode_rows
from doll.tables.rows import Rows, TableShape
from memory_stores import MemoryBlobs

pytestmark = pytest.mark.slow  # loads torch

JOB = "job: j\ntask: {class: 'm:T'}\ndata: {workers: 1, batch_size: 1}\ntraining: {policy: {name: ssp}}"
TABLES = {"users": TableShape(200_000, 4), "items": TableShape(20_000, 8)}


class Worker:
    """Fetches rows, which are all zero, and steps on them."""

    def __init__(self, optimizer: RowOptimizer | None, max_bytes: int) -> None:
        self.now = 0.0
        self.reports: list[Mapping[str, float]] = []
        self.blobs = MemoryBlobs()
        client = RowClient(parse(JOB), self.blobs, TABLES)
        self.client = client
        client.connect(self.answer)
        optimizers = None if optimizer is None else dict.fromkeys(TABLES, optimizer)
        self.rows = WorkerTables(
            client, max_bytes, optimizers=optimizers, report=self.reports.append, clock=lambda: self.now
        )

    def answer(self, request: GetRows) -> None:
        blob = self.blobs.get(request.key)
        assert blob is not None
        asked, _ = decode_row_request(blob, TABLES, job="j")
        tables = {
            name: Rows(item.ids, np.zeros((len(item.ids), TABLES[name].width), np.float32))
            for name, item in asked.items()
        }
        key = rows_key("j", 1, 0, 3, request.number)
        self.blobs.put(key, encode_rows(tables, TABLES, job="j", version=0).parts, 60.0)
        self.client.deliver(
            RowsStored(term=1, worker=0, session=3, number=request.number, version=0, key=key, included=0)
        )

    def batch(self, number: int, **ids: np.ndarray) -> None:
        grant = record_builders.grant_of(
            term=1, worker=0, session=3, first=number, grant_ids=(number + 1,), version=0, min_version=0, key="w",
            included=number,
        )  # fmt: skip
        self.rows.begin(grant, lambda: True)
        for name, asked in ids.items():
            seen = self.rows.look_up(name, asked)
            if self.rows.steps:
                ones = Rows(asked, np.ones_like(seen))
                self.rows.inc({name: self.rows.steps[name].step(seen, ones, 1.0)})
        self.rows.close(number)


@pytest.mark.parametrize("optimizer", [None, RowSgd(0.1), RowAdagrad(0.1), LazyAdam(0.1)], ids=str)
@pytest.mark.parametrize("max_bytes", [1_000_000, 3_000_000])
def test_rows_and_their_state_keep_to_the_bound_together(optimizer: RowOptimizer | None, max_bytes: int) -> None:
    rng = np.random.default_rng(1)
    worker = Worker(optimizer, max_bytes)
    for number in range(60):
        worker.batch(
            number,
            users=np.unique(rng.integers(0, 200_000, 1500)),
            items=np.unique(rng.integers(0, 20_000, 300)),
        )
        measures = worker.rows.measures()
        assert measures["row_cache_bytes"] + measures["row_state_bytes"] <= max_bytes
    assert measures["row_cache_rows"] > 1000
    has_state = optimizer is not None and bool(optimizer.state_names)
    assert (measures["row_state_rows"] > 1000) == has_state
    assert (measures["row_states_evicted_total"] > 0) == has_state
    assert measures["row_misses_total"] > 0


def test_rows_are_reported_now_and_then() -> None:
    worker = Worker(RowAdagrad(0.1), 1_000_000)
    for number in range(30):
        worker.now = float(number)
        worker.batch(number, users=np.arange(5 * number, 5 * number + 5))
    assert len(worker.reports) == 2
    assert worker.reports[-1]["row_state_rows"] == 5 * 20
