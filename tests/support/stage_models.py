"""Models for tests of stages: with statistics, a counter, frozen and empty layers, and layers that fail on demand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from doll.task.base import Sample, Task
from torch import nn

FEATURES = 6
MARK = 1e4  # an activation beyond it is a sign to `Fails`


class Fails(nn.Module):
    """Passes its input on; where a number of it is beyond `MARK` it fails as `how` says: "error", "memory"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how and float(x.detach().abs().max()) > MARK:
            raise MemoryError("no memory is left") if self.how == "memory" else ValueError("a number is too large")
        return x


class Counts(nn.Module):
    """Has a buffer of integers, which counts its calls, and no parameter."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class ChangesItsInput(nn.Module):
    """In place, as a function: no attribute says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(x, 0.5, inplace=True)


class Net(Task):
    """Two classes; layers for one to eight stages."""

    input_shape = (FEATURES,)
    num_classes = 2

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def build_model(self) -> nn.Module:
        frozen = nn.Linear(8, 8)
        frozen.requires_grad_(False)
        return nn.Sequential(
            nn.Linear(FEATURES, 8, bias=False), Fails(self.fails), nn.BatchNorm1d(8), nn.ReLU(inplace=True),
            Counts(), frozen, nn.Sequential(ChangesItsInput(), nn.Tanh()), nn.Linear(8, 2),
        )  # fmt: skip

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


class Images(Task):
    input_shape = (1, 6, 6)
    num_classes = 3

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 2, 3),
            nn.Flatten(),
            nn.Linear(8, 3),
        )

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


def samples(task: Task, seed: int, n: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """`n` samples that can be learned."""
    rng = np.random.default_rng(seed)
    assert task.input_shape is not None
    assert task.num_classes is not None
    x = rng.normal(size=(n, *task.input_shape)).astype(np.float32)
    y = (x.reshape(n, -1)[:, 0] > 0).astype(np.int64)
    return x, y


class DrawsNumbers(nn.Module):
    """The gradient of its weights is what it draws, for a loss that is the sum of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight * torch.rand(FEATURES)


class Random(Task):
    """A model whose layers each draw random numbers."""

    input_shape = (FEATURES,)
    num_classes = 2

    def build_model(self) -> nn.Module:
        return nn.Sequential(DrawsNumbers(), DrawsNumbers(), DrawsNumbers())

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum(dim=1).mean()
