"""Port: the form in which a worker sends a gradient.

A gradient is sent as it is, dense float32. A step has many zeros where its worker holds insignificant values back, or
where a batch touches few of the parameters: then only the others are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from doll.storage.blobs import Buffer, encode_blob
from doll.storage.contributions import encode_contribution
from doll.tables.rows import Rows, TableShape


class Compressor(Protocol):
    """Makes blobs of gradients. Not thread-safe: the thread that computes owns it."""

    def compress(
        self, gradient: npt.NDArray[np.float32], *, version: int, rows: Mapping[str, Rows]
    ) -> Sequence[Buffer]:
        """The blob to store, in parts as `Blobs.put` takes them.

        Args:
            gradient: float32, shape (numel,), laid out as `doll.model.flat_model` says. The parts may be views of it:
            they are
                stored before it changes.
            version: of the weights that it was computed at.
            rows: of the model's tables, by name; none where it has no tables.
        """
        ...


class DenseCompressor:
    """`Compressor` that sends every value as it is, for models without tables."""

    def __init__(self, job: str) -> None:
        self._job = job

    def compress(
        self, gradient: npt.NDArray[np.float32], *, version: int, rows: Mapping[str, Rows]
    ) -> Sequence[Buffer]:
        assert not rows, "a dense contribution has no rows"
        return encode_blob(gradient, job=self._job, kind="g", version=version)


class SparseCompressor:
    """`Compressor` that leaves out the parameters that are zero, where that is shorter, and the rows not in use."""

    def __init__(self, job: str, num_parameters: int, tables: Mapping[str, TableShape]) -> None:
        """
        Args:
            tables: shapes of the model's tables, by name.
        """
        self._job = job
        self._num_parameters = num_parameters
        self._tables = tables

    def compress(
        self, gradient: npt.NDArray[np.float32], *, version: int, rows: Mapping[str, Rows]
    ) -> Sequence[Buffer]:
        return encode_contribution(
            gradient, self._num_parameters, job=self._job, version=version, rows=rows, tables=self._tables
        )
