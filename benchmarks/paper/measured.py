"""What the simulations of MLLess's figures take from measurements: PyTorch's steps, and adding others' updates.

    python -m benchmarks.paper.measured

Matrix factorisation at the sizes of the paper's two data sets, rank 20, one thread, float32, on drawn
ratings: users and items as often as ranks of a Zipf law have it. A *dense* step is PyTorch's default, whose gradients
have all rows, with the paper's optimizer, SGD with Nesterov momentum. A *sparse* step has the rows of its batch alone
(`sparse=True`), as MLLess's has, and plain SGD. *Adding* is what a worker does with an update that it has read from
another one: its rows are added to the own tables. CPU time, the least of several, as others use the
machine too; written to measured.json, which the simulations read.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.results import commit, refuse_dirty

FILE = Path(__file__).with_suffix(".json")
RANK, REPETITIONS = 20, 60


class Size(NamedTuple):
    """A data set, and the minibatch of a worker that learns it (the paper's Table 1)."""

    users: int
    items: int
    batch: int


SIZES = {"ML-10M": Size(69_878, 10_677, 6_250), "ML-20M": Size(138_493, 26_744, 12_000)}


@dataclass(frozen=True)
class Times:
    """CPU seconds of one data set.

    Attributes:
        dense_s: a step whose gradients have all rows, with Nesterov momentum.
        sparse_s: a step whose gradients have the rows of the batch.
        add_s: adding the update of another worker's batch.
    """

    dense_s: float
    sparse_s: float
    add_s: float

    @property
    def dense_of_sparse(self) -> float:
        return self.dense_s / self.sparse_s

    @property
    def add_of_sparse(self) -> float:
        return self.add_s / self.sparse_s


class Tables(nn.Module):
    """Factors of users and of items."""

    def __init__(self, size: Size, *, is_sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(size.users, RANK, sparse=is_sparse)
        self.items = nn.Embedding(size.items, RANK, sparse=is_sparse)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * self.items(items)).sum(1)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batches(size: Size, seed: int) -> Callable[[], Batch]:
    """Draws users, items and ratings of a batch."""
    rng = np.random.default_rng((10, seed))
    of_users, of_items = (1.0 / np.arange(10, count + 10) for count in (size.users, size.items))

    def draw() -> Batch:
        users, items = (
            torch.from_numpy(rng.choice(len(weights), size.batch, p=weights / weights.sum()))
            for weights in (of_users, of_items)
        )
        return users, items, torch.from_numpy(rng.normal(3.5, 1.0, size.batch).astype(np.float32))

    return draw


def measure(size: Size) -> Times:
    draw = batches(size, 0)
    dense, sparse = Tables(size, is_sparse=False), Tables(size, is_sparse=True)
    momentum = torch.optim.SGD(dense.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    plain = torch.optim.SGD(sparse.parameters(), lr=0.01)
    seconds: dict[str, list[float]] = {"dense_s": [], "sparse_s": [], "add_s": []}
    for _ in range(REPETITIONS):  # taking turns, so that what else the machine does meets all of them
        one, other = draw(), draw()
        seconds["dense_s"].append(_timed(_step, dense, momentum, one))
        seconds["sparse_s"].append(_timed(_step, sparse, plain, one))
        update = _update(sparse, other)
        seconds["add_s"].append(_timed(_add, sparse, update))
    return Times(**{name: min(each) for name, each in seconds.items()})


def _timed(work: Callable[..., None], *args: Any) -> float:
    begin = time.process_time()
    work(*args)
    return time.process_time() - begin


def _loss(model: Tables, batch: Batch) -> torch.Tensor:
    users, items, ratings = batch
    return ((model(users, items) - ratings) ** 2).mean()


def _step(model: Tables, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    _loss(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _update(model: Tables, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows and values of each table, as another worker has written them."""
    model.zero_grad()
    _loss(model, batch).backward()  # type: ignore[no-untyped-call]
    gradients = [table.grad.coalesce() for table in model.parameters() if table.grad is not None]
    return [(each.indices()[0], -0.01 * each.values()) for each in gradients]


@torch.no_grad()
def _add(model: Tables, update: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for table, (rows, values) in zip(model.parameters(), update, strict=True):
        table.index_add_(0, rows, values)


@dataclass(frozen=True)
class Kept:
    """What measured.json has."""

    commit: str
    machine: str
    times: dict[str, Times]

    @property
    def where(self) -> str:
        """For the pages."""
        return f"commit {self.commit}, {self.machine}"


def kept() -> Kept:
    """The last measurement."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return Kept(content["commit"], content["machine"],
                {name: Times(**times) for name, times in content["times"].items()})  # fmt: skip


def main() -> None:
    refuse_dirty()
    torch.set_num_threads(1)
    times = {name: measure(size) for name, size in SIZES.items()}
    for name, each in times.items():
        print(f"{name}: dense {1000 * each.dense_s:.1f} ms, sparse {1000 * each.sparse_s:.1f} ms "
              f"({each.dense_of_sparse:.1f} times), adding an update {1000 * each.add_s:.2f} ms")  # fmt: skip
    machine = f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}, one thread"
    content = {"commit": commit(), "machine": machine, "times": {name: asdict(each) for name, each in times.items()}}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
