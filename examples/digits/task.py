"""Handwritten digits, 8 x 8: a task that learns in about a minute on two slow cores.

`digits.npz` is the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998; UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0): 1,437 originals are for streams, and 360
others are held out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from doll import GreyImageTask, Sample
from doll.producers.sources import Stream
from doll.task import images
from torch import nn

_DATA = Path(__file__).with_name("digits.npz")
_HOLDOUT_SEED = 1


class Digits(GreyImageTask):
    """Classifies the digits 0..9 with a multi-layer perceptron.

    Args:
        hidden: widths of the hidden layers.
        holdout_samples: number of held-out digits, made from originals that no stream has, with the stream's
            transforms.
    """

    input_shape = (8, 8)
    num_classes = 10

    def __init__(self, hidden: Sequence[int] = (128, 64), holdout_samples: int = 1000) -> None:
        if not all(width > 0 for width in hidden):
            raise ValueError(f"hidden: expected widths of layers above 0, got {list(hidden)}")
        self.hidden = tuple(hidden)
        self.holdout_samples = holdout_samples

    def build_model(self) -> nn.Module:
        widths = (64, *self.hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], self.num_classes))

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # Grey values have mean 80 and deviation 85: with rough standardisation, the first layer learns faster.
        output: torch.Tensor = model((x.float() - 80.0) * (1 / 85.0))
        return output

    def holdout(self) -> Iterable[Sample]:
        drawn = images.draw(*originals(held_out=True), self.holdout_samples, np.random.default_rng(_HOLDOUT_SEED))
        return [Sample(image, int(label)) for image, label in zip(*drawn, strict=True)]


def originals(*, held_out: bool = False) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return untransformed digits, for streams or held-out samples: (n, 8, 8) grey values, and (n,) classes."""
    part = "held_out_" if held_out else ""
    with np.load(_DATA) as data:
        return data[f"{part}images"], data[f"{part}labels"]


def samples(stream: Stream) -> Iterator[bytes]:
    """Yield records endlessly: random originals, each with its own random transform."""
    return images.augmented(*originals(), stream.rng())


def poison(number: int, **args: Any) -> list[bytes]:
    """Return a record of a class that does not exist, for `doll drill`."""
    return [bytes([255, *bytes(64)])]
