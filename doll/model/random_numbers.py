"""The random numbers of a batch: other ones for each batch, and the same ones for whoever computes it, and again.

Torch, numpy and Python have one generator each for a whole process. A pass over a batch begins with a seed of the
batch, so that dropout masks and negatives do not depend on the worker, nor on what it has computed before.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Final

import numpy as np
import torch

_NUMPY_SEEDS: Final = 1 << 32


def seed_of(*identity: int) -> int:
    """A seed, of 63 bits, for what these numbers identify: of a batch, the job's seed, the partition and the offset of
    its first sample.

    >>> seed_of(7, 0, 128) == seed_of(7, 0, 128), seed_of(7, 0, 128) == seed_of(7, 1, 128)
    (True, False)
    """
    return int.from_bytes(blake2b(repr(identity).encode(), digest_size=8).digest(), "little") >> 1


def draw_from(seed: int, device: str = "cpu") -> None:
    """Have torch, on the CPU and on `device`, numpy and Python's `random` go on from `seed`."""
    if device == "cpu":
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes a hundred times as long
    else:
        torch.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)
