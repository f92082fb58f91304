"""The task of jobs on several hosts: a model of 0.9 MB, and batches that take a stated time whatever the machine.

The time is a pause of the thread that computes, so that the workers of several hosts do not compete for the cores of
one machine. What is left for the network to spoil is then as on hosts of their own.
"""

from __future__ import annotations

import time

import torch
from doll import GreyImageTask
from torch import nn

from benchmarks.data import CLASSES, SIDE


class PacedImages(GreyImageTask):
    """Images of `benchmarks.data`, by two dense layers.

    Args:
        batch_s: seconds that a batch takes at least.
        batch_size: samples of a batch; fewer take no time.
        hidden: width of the hidden layer; 280 is 0.9 MB of float32.
    """

    input_shape = (SIDE, SIDE)
    num_classes = CLASSES

    def __init__(self, batch_s: float, batch_size: int, hidden: int = 280) -> None:
        self._batch_s, self._batch_size, self._hidden = batch_s, batch_size, hidden

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE * SIDE, self._hidden), nn.ReLU(), nn.Linear(self._hidden, self.num_classes)
        )

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # Not where the guard looks at the samples of a first batch one by one.
        if model.training and len(x) >= self._batch_size:
            time.sleep(self._batch_s)
        return super().forward(model, x)
