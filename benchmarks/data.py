"""Synthetic images for speed: 28 x 28 grey bytes of 47 classes, the same in every process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CLASSES = 47
SIDE = 28


def images(count: int, seed: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """uint8 of shape (count, 28, 28) and classes, int64 of shape (count,): noise around one pattern per class."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(47).integers(0, 200, (CLASSES, SIDE, SIDE), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, count)
    return patterns[labels] + rng.integers(0, 56, (count, SIDE, SIDE), dtype=np.uint8), labels


def batches(count: int, batch_size: int, seed: int) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """`count` batches as a worker has them decoded: x uint8 (batch_size, 28, 28), y int64 (batch_size,)."""
    x, y = images(count * batch_size, seed)
    return [(x[at : at + batch_size], y[at : at + batch_size]) for at in range(0, len(x), batch_size)]


def records(count: int, seed: int) -> list[bytes]:
    """`count` records as the image tasks decode them: one class byte, then the grey bytes."""
    x, y = images(count, seed)
    rows = np.concatenate([y.astype(np.uint8)[:, None], x.reshape(count, -1)], axis=1)
    return [row.tobytes() for row in rows]
