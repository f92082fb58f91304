"""Gaussian classes whose means can drift: little-endian float32 features, then the class as one float32."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from doll.producers.sources import Stream
from doll.task.records import values_of

RADIUS = 3.0  # distance of every class mean from the origin, in standard deviations
_BLOCK = 256
_HUGE = 3e38  # fits into a float32; the sum of two such numbers does not


def gaussians(stream: Stream, features: int = 20, classes: int = 2, drift_per_sample: float = 0.0) -> Iterator[bytes]:
    """Yield records endlessly. All streams share the classes.

    Args:
        drift_per_sample: distance by which the class means move with each sample of a stream.
    """
    if features < 1 or classes < 1 or drift_per_sample < 0:
        raise ValueError(
            f"expected features and classes above 0 and drift_per_sample of 0 or more, got {features}, {classes} and "
            f"{drift_per_sample}"
        )
    return samples(class_planes(features, classes, stream.shared_rng()), drift_per_sample, stream.rng(), stream.sent)


def poison(number: int, features: int = 20, classes: int = 2, **args: Any) -> list[bytes]:
    """Return records for fault `number` of `doll drill`. Odd number: a record of a class that does not exist. Even
    number: one record of each class, with features so large that its loss is not finite, unless the model classifies it
    correctly."""
    values = [0.0] * features if number % 2 else [_HUGE, -_HUGE, *[_HUGE] * features][:features]
    labels = [classes] if number % 2 else range(classes)
    return [struct.pack(f"<{features + 1}f", *values, float(label)) for label in labels]


def class_planes(features: int, classes: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.float64], ...]:
    """Return two (classes, features) arrays: unit vectors to the class means, and unit directions of their drift."""
    means = rng.standard_normal((classes, features))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    drift = rng.standard_normal((classes, features))
    drift -= (drift * means).sum(axis=1, keepdims=True) * means
    length = np.linalg.norm(drift, axis=1, keepdims=True)
    # One dimension has no second direction: the mean moves through the origin and back.
    drift = np.divide(drift, length, out=np.zeros_like(drift), where=length > 1e-9)
    return means, drift


def samples(
    planes: tuple[npt.NDArray[np.float64], ...], drift_per_sample: float, rng: np.random.Generator, start: int = 0
) -> Iterator[bytes]:
    """Yield record values endlessly.

    Args:
        planes: result of `class_planes`; streams that share it learn the same concept.
        drift_per_sample: distance by which each class mean moves with each sample of the stream, along a circle of
            `RADIUS` around the origin: the drift never ends, and the distance of two classes stays within bounds.
        start: number of samples of this stream that were drawn before; it determines how far the means have moved.
    """
    means, drift = planes
    classes, features = means.shape
    while True:
        labels = rng.integers(classes, size=_BLOCK)
        angle = (drift_per_sample / RADIUS * np.arange(start, start + _BLOCK))[:, None]
        centre = RADIUS * (np.cos(angle) * means[labels] + np.sin(angle) * drift[labels])
        rows = np.empty((_BLOCK, features + 1), "<f4")
        rows[:, :-1] = centre + rng.standard_normal((_BLOCK, features))
        rows[:, -1] = labels
        yield from values_of(rows)
        start += _BLOCK
