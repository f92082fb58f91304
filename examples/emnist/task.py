"""Handwritten letters and digits, 28 x 28, 47 classes: the DOLL paper's convolutional network, and a small one.

The data files are in IDX, MNIST's format, plain or .gz: two zero bytes, type 0x08, rank, big-endian sizes, then bytes.
"""

from __future__ import annotations

import gzip
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from doll import GreyImageTask, Sample
from doll.errors import ConfigError
from doll.producers.sources import Stream
from doll.task.images import augmented, encode
from torch import nn

_MAX_BYTES: Final = 1 << 33
_CHUNK_BYTES: Final = 1 << 24


class Emnist(GreyImageTask):
    """Classifies EMNIST (byMerge or balanced: 47 classes) with two convolutional and two dense layers.

    Args:
        images_path: IDX file whose first images are held out; None: no held-out set.
        labels_path: IDX file of their classes.
        holdout_samples: number of held-out images. Set `source.args.skip` to this number, or the stream has them, too.
        small: whether to use a network of 24 thousand instead of 1.2 million parameters: faster, but less accurate.
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
        images, labels = read_pair(Path(self.images_path), Path(self.labels_path), self.holdout_samples)
        if images.shape[1:] != self.input_shape:
            raise ConfigError(f"{self.images_path}: expected images of 28x28, got {images.shape[1]}x{images.shape[2]}")
        return [Sample(image, int(label)) for image, label in zip(images, labels, strict=True)]


def letters(stream: Stream, images_path: str, labels_path: str, skip: int = 0, augment: bool = True) -> Iterator[bytes]:
    """Yield the records of a stream endlessly: random images, each with its own random transform.

    Args:
        images_path: IDX file of the images.
        labels_path: IDX file of their classes.
        skip: number of images at the beginning to leave out, for a held-out set.
        augment: False: each image once, unchanged; image i goes to stream i mod N. With `source.in_order`, a restarted
            producer continues.
    """
    images, labels = read_pair(Path(images_path), Path(labels_path))
    if not 0 <= skip < len(images):
        raise ConfigError(f"source.args.skip: expected 0 to {len(images) - 1}, as {images_path} has images, got {skip}")
    if augment:
        return augmented(images[skip:], labels[skip:], stream.rng())
    own = slice(skip + stream.number, None, stream.count)
    return itertools.chain.from_iterable(
        encode(image[None], label[None]) for image, label in zip(images[own], labels[own], strict=True)
    )


def poison(number: int, **args: Any) -> list[bytes]:
    """Return a record of a class that does not exist, for `doll drill`."""
    return [bytes([255, *bytes(28 * 28)])]


def read_idx(path: Path, rank: int, limit: int | None = None) -> npt.NDArray[np.uint8]:
    """Read the first `limit` items (default: all) of an IDX file of unsigned bytes with `rank` dimensions.

    Raises:
        ConfigError: the file does not exist, is not IDX, has another type or rank, or is shorter than its header says.
    """
    expected = f"expected an IDX file of unsigned bytes with {rank} dimension{'s' * (rank > 1)}"
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * rank)
            if len(head) < 4 or head[:2] != b"\0\0":
                raise ConfigError(f"{path}: {expected}, got first bytes {head[:4].hex() or '(empty file)'}")
            if head[2] != 0x08 or head[3] != rank:
                raise ConfigError(f"{path}: {expected}, got type 0x{head[2]:02x} with {head[3]} dimensions")
            if len(head) < 4 + 4 * rank:
                raise ConfigError(f"{path}: {expected}, got a header cut off after {len(head)} bytes")
            count, *shape = struct.unpack_from(f">{rank}I", head, 4)
            count = count if limit is None else min(count, limit)
            size = math.prod(shape)
            if not 0 < size <= 1 << 20:
                raise ConfigError(f"{path}: expected items of 1 to {1 << 20} bytes, got sizes {shape}")
            if count * size > _MAX_BYTES:
                raise ConfigError(
                    f"{path}: expected at most {_MAX_BYTES} bytes, since all of it is held in memory; the header "
                    f"announces {count} items of {size} bytes"
                )
            body = _read(cast("BinaryIO", file), count * size)
    except (OSError, EOFError, zlib.error, MemoryError) as exc:
        raise ConfigError(f"{path}: {expected}: {getattr(exc, 'strerror', None) or exc or 'no memory for it'}") from exc
    if len(body) < count * size:
        raise ConfigError(f"{path}: expected {count} items of {size} bytes, got {len(body)} bytes")
    return np.frombuffer(body, np.uint8).reshape(count, *shape)


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    """Read at most `num_bytes` bytes. Memory grows with the actual content, not with the size in the header."""
    data = bytearray()
    while len(data) < num_bytes and (chunk := file.read(min(_CHUNK_BYTES, num_bytes - len(data)))):
        data += chunk
    return bytes(data)


def read_pair(
    images: Path, labels: Path, limit: int | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read images (n, height, width) and labels (n,) from two IDX files.

    Raises:
        ConfigError: as in `read_idx`, or the two files differ in their number of items.
    """
    pixels, classes = read_idx(images, 3, limit), read_idx(labels, 1, limit)
    if len(pixels) != len(classes):
        raise ConfigError(
            f"expected as many labels as images, got {len(pixels)} in {images}, {len(classes)} in {labels}"
        )
    return pixels, classes
