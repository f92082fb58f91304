"""Handwritten digits whose batches take a stated time, whatever the machine: one worker can be slower than the others.

The time is a pause of the thread that computes, so that workers do not compete for the cores of the machine, and what
a policy lets them wait for is seen in their times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from doll.run.local.context import RunHook
from examples.digits.task import Digits
from torch import nn

SLOWNESS_ENV: Final = "DOLL_BENCHMARK_SLOWNESS"  # of one worker's process: its batches take so many times as long


class OneSlowWorker(RunHook):
    """A run whose worker 0 takes `slowness` times as long for a batch as the others."""

    def __init__(self, slowness: float) -> None:
        self._slowness = slowness

    def environment(self, role: str) -> Mapping[str, str]:
        return {SLOWNESS_ENV: str(self._slowness)} if role == "worker-0" else {}


class PacedDigits(Digits):
    """Digits.

    Args:
        batch_s: seconds that a batch takes at least, times `SLOWNESS_ENV`.
        batch_size: samples of a batch; fewer take no time.
        digits: as of `Digits`.
    """

    def __init__(self, batch_s: float, batch_size: int = 32, **digits: Any) -> None:
        super().__init__(**digits)
        self._batch_size = batch_size
        self._batch_s = batch_s * float(os.environ.get(SLOWNESS_ENV, "1"))

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # Not where the evaluator measures, or the guard looks at the samples of a first batch one by one.
        if model.training and len(x) >= self._batch_size:
            time.sleep(self._batch_s)
        return super().forward(model, x)


class SameDirection(PacedDigits):
    """The adversary of a bound on values: each step moves all numbers by `step`, and what is missed adds up."""

    def __init__(self, step: float, **paced: Any) -> None:
        super().__init__(**paced)
        self._step = step

    def step(
        self, weights: npt.NDArray[np.float32], x: npt.NDArray[Any], y: npt.NDArray[Any], rng: np.random.Generator
    ) -> npt.NDArray[np.float32]:
        time.sleep(self._batch_s)
        return np.full_like(weights, self._step)
