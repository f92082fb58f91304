"""Tables from the layer to the server and back, over the bytes of the wire: what torch trains in one process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SgdConfig
from doll.consumers.tables.row_cache import FetchedRows, RowCache
from doll.model.without_tables import build_without_tables
from doll.optim.row_optimizer import row_optimizer
from doll.ps.tables.store import TableStore
from doll.storage import sections
from doll.storage.sections import RowRequest
from doll.tables.embedding_tables import EmbeddingTables
from doll.tables.rows import Floats, Ids, Rows
from torch import Tensor, nn

pytestmark = pytest.mark.slow  # loads torch

JOB, NUM_ROWS, WIDTH = "clicks", 500, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(NUM_ROWS, WIDTH, mode="sum", sparse=True, padding_idx=0)
        self.bias = nn.Embedding(NUM_ROWS, 1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.embed(x).tanh().sum(dim=1) + self.bias(x[:, 0]).squeeze(1)
        return output


class Worker:
    """A replica without memory for the tables; its rows and gradients travel as blobs."""

    def __init__(self, server: TableStore, max_bytes: int) -> None:
        torch.manual_seed(11)
        self.module = build_without_tables(Model)
        self.tables = EmbeddingTables(self.module)
        self.tables.connect(self.look_up)
        self.caches = {name: RowCache(shape, max_bytes) for name, shape in self.tables.shapes.items()}
        self.server, self.version = server, 0

    def look_up(self, name: str, ids: Ids) -> Floats:
        def fetch(request: RowRequest) -> FetchedRows:
            asked = sections.encode_row_request({name: request}, self.tables.shapes, job=JOB, version=self.version)
            requests, oldest = sections.decode_row_request(b"".join(asked.parts), self.server.shapes, job=JOB)
            assert oldest == self.version
            rows = {name: answer.rows for name, answer in self.server.answer(requests).items()}
            answer = sections.encode_rows(rows, self.server.shapes, job=JOB, version=self.version)
            back = sections.decode_rows(b"".join(answer.parts), self.tables.shapes, job=JOB)
            return FetchedRows(back.rows[name], back.version)

        return self.caches[name].get(ids, self.version, fetch)

    def push(self, x: Tensor, y: Tensor) -> bytes:
        self.tables.reset()
        (nn.functional.mse_loss(self.module(x), y) * len(x)).backward()
        gradients = dict(self.tables.gradients())
        return b"".join(sections.encode_push(gradients, self.tables.shapes, job=JOB, version=self.version).parts)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (SgdConfig(lr=0.5), lambda parameters: torch.optim.SGD(parameters, lr=0.5)),
        (AdamConfig(lr=0.05), lambda parameters: torch.optim.SparseAdam(parameters, lr=0.05)),
        (
            AdagradConfig(lr=0.1, initial_accumulator=0.01),
            lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.01),
        ),
    ],
)
@pytest.mark.parametrize("max_bytes", [0, 5_000, 1_000_000])
def test_learns_what_torch_learns(
    config: OptimizerConfig, reference: Callable[..., torch.optim.Optimizer], max_bytes: int
) -> None:
    torch.manual_seed(11)
    plain = Model()
    optimizer = reference(list(plain.parameters()))
    torch.manual_seed(11)
    initial = EmbeddingTables(Model()).take_initial()
    server = TableStore(initial, dict.fromkeys(initial, row_optimizer(config)))
    worker = Worker(server, max_bytes)
    rng = np.random.default_rng(5)
    for version in range(1, 40):
        x = torch.from_numpy(rng.zipf(1.3, (32, 6)) % NUM_ROWS)
        y = torch.from_numpy(rng.standard_normal(32).astype(np.float32))
        pushed = sections.decode_push(worker.push(x, y), server.shapes, job=JOB, version=worker.version)
        server.add({name: rows for name, rows in pushed.items() if isinstance(rows, Rows)})
        server.apply(1 / 32, version)
        worker.version = version
        optimizer.zero_grad()
        with torch.sparse.check_sparse_tensor_invariants():
            nn.functional.mse_loss(plain(x), y).backward()
            optimizer.step()
    for name, parameter in plain.named_parameters():
        rows = server.tables[name].read(np.arange(NUM_ROWS)).values
        np.testing.assert_allclose(rows, parameter.detach().numpy(), rtol=1e-3, atol=1e-5)
        assert len(server.tables[name]._touched) < NUM_ROWS
    cache = worker.caches["embed.weight"]
    assert cache.num_bytes <= max(max_bytes, 100)
    assert (cache.num_hits, cache.num_misses > 0) == (0, True), "each version is another: only changed rows are sent"
