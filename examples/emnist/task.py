"""Handwritten letters and digits, 28 x 28, 47 classes: the DOLL paper's convolutional network, and a small one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from doll import GreyImageTask, Sample
from doll.errors import ConfigError
from doll.producers.sources import idx
from torch import nn


class Emnist(GreyImageTask):
    """EMNIST (byMerge or balanced: 47 classes) by two convolutional and two dense layers.

    Args:
        images_path: IDX file whose first images are held out; None: no held-out set.
        labels_path: IDX file of their classes.
        holdout_samples: how many. Set `source.skip` to as many, or the stream has them too.
        small: a network of 24 thousand parameters instead of 1.2 million: faster, some points of accuracy less.
    """

    input_shape = (28, 28)
    num_classes = 47

    def __init__(
        self,
        images_path: str | None = None,
        labels_path: str | None = None,
        holdout_samples: int = 2000,
        small: bool = False,
    ) -> None:
        if (images_path is None) != (labels_path is None):
            raise ValueError("expected images_path and labels_path together")
        self.images_path = images_path
        self.labels_path = labels_path
        self.holdout_samples = holdout_samples
        self.small = small

    def build_model(self) -> nn.Module:
        if self.small:
            return nn.Sequential(
                nn.Conv2d(1, 8, 5),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 5),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(256, 66),
                nn.ReLU(),
                nn.Linear(66, self.num_classes),
            )
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, self.num_classes),
        )

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # Mean and deviation of EMNIST's grey values, in fractions of white.
        output: torch.Tensor = model(((x.float() * (1 / 255) - 0.175) * (1 / 0.333)).unsqueeze(1))
        return output

    def holdout(self) -> Iterable[Sample]:
        if self.images_path is None or self.labels_path is None:
            return ()
        images, labels = idx.read_pair(Path(self.images_path), Path(self.labels_path), self.holdout_samples)
        if images.shape[1:] != self.input_shape:
            raise ConfigError(f"{self.images_path}: expected images of 28x28, got {images.shape[1]}x{images.shape[2]}")
        return [Sample(image, int(label)) for image, label in zip(images, labels, strict=True)]
