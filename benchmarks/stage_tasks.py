"""A task whose layers sleep instead of computing, so that the cores of this machine do not matter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from doll import Task


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


def pause(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    """`x`; both passes through here take so many seconds."""
    slept: torch.Tensor = _Sleep.apply(x, forward_s, backward_s)
    return slept


class SleepingLayer(torch.nn.Module):
    """Takes given times, and learns one weight."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.times_s = (forward_s, backward_s)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pause(x * self.weight, *self.times_s)


class Sleeping(Task):
    """Layers that take `times`, (forward_s, backward_s) each."""

    input_shape = (4,)

    def __init__(self, times: Sequence[Sequence[float]]) -> None:
        self.times = [(float(forward_s), float(backward_s)) for forward_s, backward_s in times]

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(*(SleepingLayer(*times) for times in self.times))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean()


class Wide(Task):
    """Linear layers of one width with a ReLU behind each."""

    num_classes = 10

    def __init__(self, width: int, layers: int) -> None:
        self.width, self.layers = width, layers
        self.input_shape = (width,)

    def build_model(self) -> torch.nn.Module:
        modules: list[torch.nn.Module] = []
        for _ in range(self.layers):
            modules += [torch.nn.Linear(self.width, self.width), torch.nn.ReLU()]
        return torch.nn.Sequential(*modules, torch.nn.Linear(self.width, 10))


class Convolutions(Task):
    """Images through blocks of convolution, normalisation and ReLU, with twice the channels and half the side from
    each to the next: the first layers have most of the activations, the last ones most of the weights."""

    num_classes = 10

    def __init__(self, channels: int, blocks: int, side: int) -> None:
        self.channels, self.blocks = channels, blocks
        self.input_shape = (3, side, side)
        self._left = side >> blocks

    def build_model(self) -> torch.nn.Module:
        modules: list[torch.nn.Module] = []
        before, channels = 3, self.channels
        for _ in range(self.blocks):
            modules += [
                torch.nn.Conv2d(before, channels, 3, padding=1), torch.nn.BatchNorm2d(channels), torch.nn.ReLU(),
                torch.nn.MaxPool2d(2),
            ]  # fmt: skip
            before, channels = channels, 2 * channels
        return torch.nn.Sequential(*modules, torch.nn.Flatten(), torch.nn.Linear(before * self._left**2, 10))
