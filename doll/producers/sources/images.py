"""Images as records of equal length: one label byte, then height x width grey bytes, row by row.

Streams without end draw originals and transform each one at random (small affine and perspective transforms, a block
at a time): no drawn image repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

_BLOCK_PIXELS = 16_384  # about 10 ms of work: the sender's loop must not stall for longer


def encode(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> list[bytes]:
    """One record value per image."""
    count = len(images)
    width = images[0].size + 1
    rows = np.empty((count, width), np.uint8)
    rows[:, 0] = labels
    rows[:, 1:] = images.reshape(count, -1)
    return values_of(rows)


def values_of(rows: npt.NDArray[Any]) -> list[bytes]:
    """The bytes of each row of an array, which are a record value."""
    block = rows.tobytes()
    width = len(block) // len(rows)
    return [block[at : at + width] for at in range(0, len(block), width)]


def augmented(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], rng: np.random.Generator
) -> Iterator[bytes]:
    """Record values without end: random originals, each under its own random transform."""
    count = max(1, _BLOCK_PIXELS // images[0].size)
    while True:
        yield from encode(*draw(images, labels, count, rng))


def in_order(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> Iterator[bytes]:
    """Record values of the images as they are, once."""
    for at in range(0, len(images), 256):
        yield from encode(images[at : at + 256], labels[at : at + 256])


class Strength(NamedTuple):
    """Bounds of the uniform draws. Positions are in half image sides, so one strength fits every size."""

    rotation_rad: float = np.deg2rad(15.0)
    scale_low: float = 0.9
    scale_high: float = 1.1
    shear: float = 0.1
    shift: float = 0.125  # 0.5 pixel of an 8x8 image
    perspective: float = 0.06


MILD: Final = Strength()


def homographies(count: int, rng: np.random.Generator, strength: Strength = MILD) -> npt.NDArray[np.float32]:
    """(count, 3, 3) maps from output position to source position, both homogeneous and centred, in half image sides."""
    angle = rng.uniform(-strength.rotation_rad, strength.rotation_rad, count)
    scale_x, scale_y = rng.uniform(strength.scale_low, strength.scale_high, (2, count))
    shear = rng.uniform(-strength.shear, strength.shear, count)
    shift_x, shift_y = rng.uniform(-strength.shift, strength.shift, (2, count))
    tilt_x, tilt_y = rng.uniform(-strength.perspective, strength.perspective, (2, count))
    cos, sin = np.cos(angle), np.sin(angle)
    maps = np.empty((count, 3, 3), np.float32)
    # Rotation x shear x scale; the scale divides because the map goes from the output back to the source.
    maps[:, 0, 0] = cos / scale_x
    maps[:, 0, 1] = (cos * shear - sin) / scale_y
    maps[:, 0, 2] = shift_x
    maps[:, 1, 0] = sin / scale_x
    maps[:, 1, 1] = (sin * shear + cos) / scale_y
    maps[:, 1, 2] = shift_y
    maps[:, 2, 0] = tilt_x
    maps[:, 2, 1] = tilt_y
    maps[:, 2, 2] = 1.0
    return maps


def warp(images: npt.NDArray[np.uint8], maps: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Each image seen through its map, with bilinear sampling; outside an image is 0.

    Args:
        images: (n, height, width).
        maps: (n, 3, 3), see `homographies`.

    Returns:
        (n, height, width).
    """
    count, height, width = images.shape
    rows, cols = np.mgrid[:height, :width].reshape(2, -1).astype(np.float32)
    half_h, half_w = height / 2, width / 2
    grid = np.stack([(cols + 0.5) / half_w - 1, (rows + 0.5) / half_h - 1, np.ones_like(rows)])
    source = maps @ grid
    source[:, :2] /= source[:, 2:]
    # Two pixels of zeros on each side: whatever falls outside is clamped into them and reads 0.
    padded = np.zeros((count, height + 4, width + 4), np.float32)
    padded[:, 2:-2, 2:-2] = images
    x = np.clip(source[:, 0] * half_w + (half_w + 1.5), 0, width + 2)
    y = np.clip(source[:, 1] * half_h + (half_h + 1.5), 0, height + 2)
    left, top = x.astype(np.int32), y.astype(np.int32)
    x -= left
    y -= top
    stride = width + 4
    at = top * stride + left + (np.arange(count, dtype=np.int32) * (stride * (height + 4)))[:, None]
    flat = padded.reshape(-1)
    upper = flat[at] * (1 - x) + flat[at + 1] * x
    lower = flat[at + stride] * (1 - x) + flat[at + stride + 1] * x
    out: npt.NDArray[np.float32] = upper * (1 - y) + lower * y
    return (out + 0.5).astype(np.uint8).reshape(images.shape)


def draw(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], count: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """`count` random originals, each under its own random transform: (count, height, width) and (count,)."""
    chosen = rng.integers(len(images), size=count)
    return warp(images[chosen], homographies(count, rng)), labels[chosen]
