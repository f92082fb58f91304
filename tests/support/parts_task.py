"""A task whose model has whatever a checkpoint holds: parameters, buffers of both kinds, a table, and a frozen part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from doll.producers.sources import Stream
from doll.task.base import Sample, Task


class Parts(Task):
    """Bags of ids of two classes."""

    input_shape = (5,)
    num_classes = 2

    def __init__(self, rows: int = 10, hidden: int = 4, body: str = "body", frozen: float = 1.0) -> None:
        self.rows, self.hidden, self.body, self.frozen = rows, hidden, body, frozen

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Module()
        model.bag = torch.nn.EmbeddingBag(self.rows, 3, mode="sum", sparse=True)
        body = torch.nn.Sequential(torch.nn.Linear(3, self.hidden), torch.nn.BatchNorm1d(self.hidden))
        model.add_module(self.body, body)
        model.trunk = torch.nn.Linear(self.hidden, 2)
        torch.nn.init.constant_(model.trunk.weight, self.frozen)
        model.trunk.weight.requires_grad_(False)
        return model

    def decode(self, record: bytes) -> Sample:
        ids = np.frombuffer(record, "<i8")
        return Sample(ids, int(ids.sum()) % 2)

    def forward(self, model: Any, x: torch.Tensor) -> Any:
        return model.trunk(getattr(model, self.body)(model.bag(x)))


def bags(stream: Stream) -> Iterator[bytes]:
    """Records of `Parts`, without an end."""
    rng = stream.rng()
    while True:
        yield rng.integers(0, 10, 5).astype("<i8").tobytes()
