"""Images as records of equal length: one label byte, then height x width grey bytes, row by row.

`GreyImageTask` decodes them. `augmented` makes an endless stream from a few images, for a source of kind python. It
draws originals, and transforms each at random (small affine and perspective transforms), so that no image repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.errors import SampleError
from doll.task.base import Sample, Task
from doll.task.records import values_of

_BLOCK_PIXELS: Final = 16_384  # about 10 ms of work: the sender's loop must not stall for longer


class GreyImageTask(Task):
    """Grey images of `input_shape` (height, width), values 0..255, with a class in 0 .. num_classes - 1."""

    input_shape: tuple[int, ...]
    num_classes: int

    def decode(self, record: bytes) -> Sample:
        height, width = self.input_shape
        if len(record) != 1 + height * width:
            raise SampleError(
                f"expected {1 + height * width} bytes (class, then {height}x{width} grey values), got {len(record)}"
            )
        if record[0] >= self.num_classes:
            raise SampleError(f"expected a class in 0..{self.num_classes - 1} in the first byte, got {record[0]}")
        return Sample(np.frombuffer(record, np.uint8, offset=1).reshape(height, width), record[0])

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        height, columns = self.input_shape
        if width != 1 + height * columns:
            return None
        rows = np.frombuffer(block, np.uint8).reshape(-1, width)
        if len(rows) and rows[:, 0].max() >= self.num_classes:
            return None  # `decode` decodes record by record, and names the bad record and the reason
        # A copy, because torch cannot write to the bytes of a record.
        return rows[:, 1:].copy().reshape(-1, height, columns), rows[:, 0].astype(np.int64)


def encode(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> list[bytes]:
    """Encode images of shape (n, height, width) and their labels of shape (n,) as record values."""
    return values_of(np.column_stack([labels, images.reshape(len(images), -1)]))


def augmented(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], rng: np.random.Generator
) -> Iterator[bytes]:
    """Yield an endless sequence of record values; they are drawn in blocks with `draw`."""
    count = max(1, _BLOCK_PIXELS // images[0].size)
    while True:
        yield from encode(*draw(images, labels, count, rng))


def draw(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], count: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Draw `count` random originals, each with its own random transform: shapes (count, height, width) and (count,)."""
    chosen = rng.integers(len(images), size=count)
    return warp(images[chosen], homographies(count, rng)), labels[chosen]


def homographies(count: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return random maps (count, 3, 3) from output to source positions, homogeneous, centred, in half image sides.

    In these units, the limits of the random numbers suit images of any size.
    """
    angle = rng.uniform(-np.deg2rad(15.0), np.deg2rad(15.0), count)
    scale_x, scale_y = rng.uniform(0.9, 1.1, (2, count))
    shear = rng.uniform(-0.1, 0.1, count)
    shift_x, shift_y = rng.uniform(-0.125, 0.125, (2, count))  # 0.5 pixel of an 8x8 image
    tilt_x, tilt_y = rng.uniform(-0.06, 0.06, (2, count))
    cos, sin = np.cos(angle), np.sin(angle)
    # Rotation x shear x scale. The scale is a divisor, because the map goes from the output back to the source.
    rows = (
        (cos / scale_x, (cos * shear - sin) / scale_y, shift_x),
        (sin / scale_x, (sin * shear + cos) / scale_y, shift_y),
        (tilt_x, tilt_y, np.ones(count)),
    )
    return np.moveaxis(np.array(rows, np.float32), -1, 0)


def warp(images: npt.NDArray[np.uint8], maps: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Apply a map to each image, with bilinear sampling; pixels outside of the source image are 0.

    Args:
        images: images, shape (n, height, width).
        maps: one map per image, shape (n, 3, 3), see `homographies`.

    Returns:
        The mapped images, shape (n, height, width).
    """
    import torch
    from torch.nn import functional

    y, x = ((torch.arange(size) + 0.5) * (2 / size) - 1 for size in images.shape[1:])
    grid = torch.stack([*torch.meshgrid(x, y, indexing="xy"), torch.ones(images.shape[1:])], -1)
    source = torch.einsum("hwc,nkc->nhwk", grid, torch.from_numpy(maps))
    source = source[..., :2] / source[..., 2:]
    grey = torch.from_numpy(images)[:, None].float()
    out = functional.grid_sample(grey, source, align_corners=False)[:, 0]
    warped: npt.NDArray[np.uint8] = (out + 0.5).to(torch.uint8).numpy()
    return warped
