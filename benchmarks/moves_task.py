"""A task whose gradients take a given time on any machine: the cores do not matter."""

from __future__ import annotations

from examples.synthetic.task import Gaussian
from torch import nn

from benchmarks.stage_tasks import SleepingLayer


class SleepingGaussian(Gaussian):
    """`Gaussian` with a layer that takes `seconds` for a batch.

    Args:
        seconds: of both passes together.
    """

    def __init__(self, features: int = 20, classes: int = 2, seconds: float = 0.1) -> None:
        super().__init__(features, classes)
        self.seconds = seconds

    def build_model(self) -> nn.Module:
        return nn.Sequential(super().build_model(), SleepingLayer(self.seconds / 2, self.seconds / 2))
