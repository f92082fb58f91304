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

from benchmarks.stage_tasks import pause

FORWARD_SHARE: Final = 1 / 3  # of a block's time: the backward pass has twice the arithmetic
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


class Drift:
    """How the speed of this process's device changes: a lognormal factor on its times, another one every `every_s`.

    The factors are the process's own: they are drawn from its id and the time.
    """

    def __init__(self, sigma: float, every_s: float) -> None:
        self.sigma, self.every_s = sigma, every_s

    def factor(self, now_s: float, process: int) -> float:
        """Median 1; the same within a period of `every_s`."""
        if not self.sigma:
            return 1.0
        draw = np.random.default_rng((process, int(now_s / self.every_s))).standard_normal()
        return float(np.exp(self.sigma * draw))


class PacedBlock(nn.Module):
    """A residual block, (n, width) to (n, width), whose passes take a stated time for a whole batch.

    The first block of a stage also takes the time of the link to the stage before it, in either direction.
    """

    def __init__(self, width: int, scale: float, block_s: float, batch_size: int, drift: Drift, link_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._scale, self._block_s, self._batch_size, self._drift = scale, block_s, batch_size, drift
        self._link_s = link_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = x + self._scale * torch.relu(self.linear(x))
        # Neither where the evaluator measures, nor where the cut is compared with the undivided model.
        if not (self.training and torch.is_grad_enabled() and len(x) >= self._batch_size):
            return output
        block_s = self._block_s * self._drift.factor(time.monotonic(), os.getpid())
        link_s = self._link_s if x.is_leaf else 0.0  # what no layer of this process has computed has come over a link
        return pause(output, FORWARD_SHARE * block_s + link_s, (1 - FORWARD_SHARE) * block_s + link_s)


class PacedBlocks(Digits):
    """Digits by blocks that can be cut anywhere: each takes as long as the others, and has as many parameters.

    Args:
        blocks: how many.
        width: numbers between two of them.
        block_s: seconds of a batch in a block, forward and backward.
        batch_size: samples of a batch; fewer take no time.
        drift, drift_every_s: sigma and period of `Drift`.
        link_s: seconds of a batch's activations, or of its gradients, between two stages.
        digits: as of `Digits`.
    """

    def __init__(
        self, blocks: int, width: int, block_s: float, batch_size: int, drift: float = 0.0, drift_every_s: float = 1.0,
        link_s: float = 0.0, **digits: Any,
    ) -> None:  # fmt: skip
        super().__init__(**digits)
        self.blocks, self.width = blocks, width
        self.block_s, self._batch_size = block_s, batch_size
        self.drift, self.link_s = Drift(drift, drift_every_s), link_s

    def build_model(self) -> nn.Module:
        scale = self.blocks**-0.5
        blocks = (
            PacedBlock(self.width, scale, self.block_s, self._batch_size, self.drift, self.link_s)
            for _ in range(self.blocks)
        )
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, self.width), nn.ReLU(), *blocks, nn.Linear(self.width, self.num_classes)
        )
