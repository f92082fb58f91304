"""Images as records of equal length: one label byte, then height x width grey bytes, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from doll.producers import augment

_BLOCK_PIXELS = 16_384  # about 10 ms of work: the sender's loop must not stall for longer


def encode(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> list[bytes]:
    """One record value per image."""
    count = len(images)
    width = images[0].size + 1
    rows = np.empty((count, width), np.uint8)
    rows[:, 0] = labels
    rows[:, 1:] = images.reshape(count, -1)
    block = rows.tobytes()
    return [block[at : at + width] for at in range(0, len(block), width)]


def augmented(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], rng: np.random.Generator
) -> Iterator[bytes]:
    """Record values without end: random originals, each under its own random transform."""
    count = max(1, _BLOCK_PIXELS // images[0].size)
    while True:
        yield from encode(*augment.draw(images, labels, count, rng))


def in_order(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> Iterator[bytes]:
    """Record values of the images as they are, once."""
    for at in range(0, len(images), 256):
        yield from encode(images[at : at + 256], labels[at : at + 256])
