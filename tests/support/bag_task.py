"""A task whose model has an embedding, as a table or as a dense parameter, and a dense layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from doll import BoundedEmbeddingBag
from doll.task.base import Sample, Task


class Bags(Task):
    """Each sample is a bag of ids; its class is whether their sum is even."""

    input_shape = (5,)
    num_classes = 2

    def __init__(
        self, ids: int = 40, width: int = 3, sparse: bool = True, dense: bool = True, bad: int = -1,
        bounded: bool = False,
    ) -> None:  # fmt: skip
        self.ids = ids
        self.width = width
        self.sparse = sparse
        self.dense = dense
        self.bounded = bounded
        self.bad = bad  # of each batch this sample has an id beyond the table

    def build_model(self) -> torch.nn.Module:
        width = self.width if self.dense else 2
        bag: torch.nn.EmbeddingBag
        if self.bounded:
            bag = BoundedEmbeddingBag(self.ids, width, mode="sum")
        else:
            bag = torch.nn.EmbeddingBag(self.ids, width, mode="sum", sparse=self.sparse)
        return torch.nn.Sequential(bag, torch.nn.Linear(self.width, 2)) if self.dense else torch.nn.Sequential(bag)

    def decode(self, record: bytes) -> Sample:
        ids = np.frombuffer(record, "<i8")
        return Sample(ids, int(ids.sum()) % 2)

    def make(self, rng: np.random.Generator, at: int) -> bytes:
        """One record."""
        ids = rng.integers(0, self.ids, size=5).astype("<i8")
        if at == self.bad:
            ids[2] = self.ids
        return ids.tobytes()

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> Any:
        return model(x)
