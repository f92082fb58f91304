"""The ESSP paper's tasks on workers of given speed: a batch takes longer than its arithmetic, and one worker is slow.

A worker sleeps in each batch. So clocks take as long as on machines of their own, although all workers share the cores
of one machine: what is measured is the policy, and not who gets a core. The first worker that computes a batch is the
straggler; a file with a name of its own says that there is one.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from doll.tables.rows import LookUp, Rows
from examples.lda.task import Topics
from examples.ratings.task import Pmf

_SHAPE = 20.0  # of the Gamma distribution of a clock's seconds, as in Fig. 1's simulation
_DOUBLED = 0.05  # share of clocks that take twice as long, whichever the worker


class Pace:
    """How long a worker sleeps in each batch: Gamma(20) times a mean, one in 20 twice that, the straggler longer."""

    def __init__(self, mean_s: float, slowdown: float, straggler_file: str) -> None:
        """
        Args:
            mean_s: seconds of a clock; 0: no worker sleeps.
            slowdown: factor of the straggler.
            straggler_file: is created by the straggler; its folder exists.
        """
        self._mean_s = mean_s
        self._slowdown = slowdown
        self._path = Path(straggler_file)
        self._factor: float | None = None

    def seconds(self, x: npt.NDArray[Any]) -> float:
        """Of the batch with these samples; the same for the same samples."""
        if not self._mean_s:
            return 0.0
        if self._factor is None:
            self._factor = self._slowdown if self._is_first() else 1.0
        rng = np.random.default_rng(zlib.crc32(x.tobytes()))
        doubled = 1.0 + float(rng.random() < _DOUBLED)
        return self._factor * self._mean_s * doubled * float(rng.standard_gamma(_SHAPE)) / _SHAPE

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class SlowRatings(Pmf):
    """`Pmf`; a batch takes as long as `Pace` says."""

    def __init__(self, *, clock_s: float, slowdown: float, straggler_file: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pace = Pace(clock_s, slowdown, straggler_file)

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # not where held-out samples are evaluated
            time.sleep(self._pace.seconds(x.numpy()))
        return super().forward(model, x)


class SlowTopics(Topics):
    """`Topics`; a batch takes as long as `Pace` says."""

    def __init__(self, *, clock_s: float, slowdown: float, straggler_file: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pace = Pace(clock_s, slowdown, straggler_file)

    def step_rows(
        self,
        weights: npt.NDArray[np.float32],
        look_up: LookUp,
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        rng: np.random.Generator,
    ) -> tuple[npt.NDArray[np.float32], Mapping[str, Rows]]:
        time.sleep(self._pace.seconds(x))
        return super().step_rows(weights, look_up, x, y, rng)
