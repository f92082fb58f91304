"""Handwritten digits, 8 x 8: a task that learns in about a minute on two slow cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from doll import GreyImageTask, Sample
from doll.producers.sources import digits
from torch import nn

_HOLDOUT_SEED = 1


class Digits(GreyImageTask):
    """The digits source's classes 0..9, by a multi-layer perceptron.

    Args:
        hidden: widths of the hidden layers.
        holdout_samples: held-out digits, from originals that no stream has, under the stream's random transforms.
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
        # Grey values are about 80 with a deviation of about 85: roughly standardised, the first layer learns faster.
        output: torch.Tensor = model((x.float() - 80.0) * (1 / 85.0))
        return output

    def holdout(self) -> Iterable[Sample]:
        images, labels = digits.holdout(self.holdout_samples, _HOLDOUT_SEED)
        return [Sample(image, int(label)) for image, label in zip(images, labels, strict=True)]
