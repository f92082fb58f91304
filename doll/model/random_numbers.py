"""The random numbers of a batch: different for each batch, and the same for each computation of the same batch.

Torch, numpy and Python each have one generator for the whole process. Before a pass over a batch, all of them get the
seed of the batch. So dropout masks and negatives depend neither on the worker nor on its earlier computations.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Final

import numpy as np
import torch

_NUMPY_SEEDS: Final = 1 << 32


def seed_of(*identity: int) -> int:
    """Return a seed of 63 bits for the given numbers. The seed of a batch is made of the job's seed, the partition and
    the offset of the batch's first sample.

    >>> seed_of(7, 0, 128) == seed_of(7, 0, 128), seed_of(7, 0, 128) == seed_of(7, 1, 128)
    (True, False)
    """
    return int.from_bytes(blake2b(repr(identity).encode(), digest_size=8).digest(), "little") >> 1


def draw_from(seed: int, device: str = "cpu") -> None:
    """Seed the generators of torch (on the CPU and on `device`), numpy and Python's `random` with `seed`."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes a hundred times as long
    if device.startswith("cuda"):
        torch.cuda.init()  # type: ignore[no-untyped-call]  # makes the generators, once
        torch.cuda.default_generators[int(device.partition(":")[2] or 0)].manual_seed(seed)
    elif device == "mps":
        torch.mps.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)
