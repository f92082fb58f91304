"""Port: the form in which a worker sends a gradient.

Today all of it is sent, as dense float32. Policies that hold insignificant values back keep them as a residual behind
the same call and send the rest in a sparse form, which the server's `ModelHost` then reads (docs/decisions/0020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from doll.storage.blobs import Buffer, encode_blob


class Compressor(Protocol):
    """Makes blobs of gradients. Not thread-safe: the thread that computes owns it."""

    def compress(self, gradient: npt.NDArray[np.float32], *, version: int) -> Sequence[Buffer]:
        """The blob to store, in parts as `Blobs.put` takes them.

        Args:
            gradient: float32, shape (numel,), laid out as `doll.model` says. The parts may be views of it: they are
                stored before it changes.
            version: of the weights that it was computed at.
        """
        ...


class DenseCompressor:
    """`Compressor` that sends every value as it is."""

    def __init__(self, job: str) -> None:
        self._job = job

    def compress(self, gradient: npt.NDArray[np.float32], *, version: int) -> Sequence[Buffer]:
        return encode_blob(gradient, job=self._job, kind="g", version=version)
