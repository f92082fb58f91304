"""A model whose weights are numbers of events: one weight for each partition, the mean of the last batch."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from doll import Sample, Task
from torch import nn

RECORD = struct.Struct("<ff")  # partition, number of the event in its partition


class Numbers(Task):
    """With plain SGD and lr 0.5, a batch of one partition sets the weight of this partition to the mean of the batch.

    Args:
        partitions: of the stream.
    """

    def __init__(self, partitions: int) -> None:
        self.input_shape = (partitions,)

    def build_model(self) -> nn.Module:
        model = nn.Linear(self.input_shape[0], 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def decode(self, record: bytes) -> Sample:
        partition, number = RECORD.unpack(record)
        x = np.zeros(self.input_shape, np.float32)
        x[int(partition)] = 1.0
        return Sample(x, np.float32(number))

    def decode_block(self, block: memoryview, width: int) -> tuple[Any, Any] | None:
        if width != RECORD.size:
            return None
        values = np.frombuffer(block, "<f4").reshape(-1, 2)
        return np.eye(self.input_shape[0], dtype=np.float32)[values[:, 0].astype(int)], values[:, 1].copy()

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output.reshape(target.shape), target)
