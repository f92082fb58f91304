"""A model that counts the rows that it has learned: `benchmarks.history_model`."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from doll import JsonTask

COUNTERS: Final = 16_384  # of 50 million rows each one counts 3,052, and adds up 4.7 million: whole numbers in float32


class Row(msgspec.Struct):
    id: int
    y: float


class Counted(JsonTask):
    """Two weights for each remainder of the row's number by `COUNTERS`: how many such rows, and the sum of their
    quotients. A row that is missing or twice changes both."""

    record = Row
    targets = ("y",)

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Linear(COUNTERS, 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    def samples(self, columns: dict[str, Any]) -> tuple[Any, Any]:
        return columns["id"].astype(np.int64)[:, None], columns["y"].astype(np.float32)

    def forward(self, model: torch.nn.Module, x: Any) -> torch.Tensor:
        return torch.zeros(len(x))

    def losses(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        return output

    def step(self, weights: Any, x: Any, y: Any, rng: Any) -> npt.NDArray[np.float32]:
        return counts_of(np.asarray(x)[:, 0]).ravel()


def counts_of(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return what these rows add to the weights, shape (2, COUNTERS)."""
    counter, quotient = ids % COUNTERS, ids // COUNTERS
    parts = np.bincount(counter, minlength=COUNTERS), np.bincount(counter, quotient, COUNTERS)
    return np.stack(parts).astype(np.float32)
