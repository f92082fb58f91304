"""Logistic regression on clicks in Criteo's format: 13 numbers and 26 hashed categories.

As MLLess learns it (Sarroca, Sanchez-Artigas: MLLess, 2023): 13 weights and `columns` hashed ones. Every transform is
fixed beforehand: nothing is learned from records that a live stream would not have shown yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from doll import BoundedEmbedding, Sample, Task
from doll.errors import BadRecordsError, SampleError
from doll.producers.sources import criteo
from doll.producers.sources.synthetic_clicks import LOG_SCALE
from doll.records import lines
from torch import nn

_MOST_DENSE_COLUMNS: Final = 1_000_000
_MOST_COLUMNS: Final = 2**31 - 1
_SALTS: Final = np.arange(1, criteo.CATEGORIES + 1, dtype=np.uint64) << np.uint64(32)


class Clicks(Task):
    """Whether an impression is clicked. Records are packed ones (`doll.producers.sources.criteo`) or Criteo's lines.

    A sample's x is int32, shape (39,): the 13 counts, then the columns of the 26 categories. Its numbers are the
    logarithms of the counts c, `sign(c) ln(1 + |c|) / 4`, and 0 for a count that is not there.

    Args:
        columns: of the table that the categories are hashed into. A category that is not there has a column too.
        sparse: keep the columns as a table at the server, and send only the columns of a batch; None: above 1,000,000.
        bounded: the table has rows for the columns that are used alone; `training.tables` says for how many.
        holdout_path: file of Criteo's lines that are held out; None: no held-out set.
        holdout_samples: how many of its first lines.
    """

    input_shape = (criteo.COUNTS + criteo.CATEGORIES,)
    num_classes = 2

    def __init__(
        self,
        columns: int = 100_000,
        sparse: bool | None = None,
        bounded: bool = False,
        holdout_path: str | None = None,
        holdout_samples: int = 2000,
    ) -> None:
        if not 0 < columns <= _MOST_COLUMNS:
            raise ValueError(f"columns: expected 1 to {_MOST_COLUMNS}, got {columns}")
        self.columns = columns
        self.sparse = columns > _MOST_DENSE_COLUMNS if sparse is None else sparse
        self.bounded = bounded
        self.holdout_path = holdout_path
        self.holdout_samples = holdout_samples

    def build_model(self) -> nn.Module:
        return SparseLinear(criteo.COUNTS, self.columns, sparse=self.sparse, bounded=self.bounded)

    def decode(self, record: bytes) -> Sample:
        packed = record if criteo.is_packed(record) else criteo.pack_line(record)
        if problem := criteo.problem_of(packed):
            raise SampleError(problem)
        x, y = self._samples(np.frombuffer(packed, criteo.RECORD))
        return Sample(x[0], y[0])

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        if width != criteo.RECORD.itemsize:
            return None
        rows = np.frombuffer(block, criteo.RECORD)
        return self._samples(rows) if criteo.check(rows).all() else None  # `decode` says what is wrong

    def decode_many(self, values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        packed, bad = [], []
        for at, value in enumerate(values):
            try:
                packed.append(value if criteo.is_packed(value) else criteo.pack_line(value))
            except SampleError:
                bad.append(at)
        if bad:
            raise BadRecordsError(bad)
        rows = np.frombuffer(b"".join(packed), criteo.RECORD)
        if not (good := criteo.check(rows)).all():
            raise BadRecordsError(np.flatnonzero(~good))
        return self._samples(rows)

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        counts = x[:, : criteo.COUNTS]
        numbers = counts.float()
        logs = torch.sign(numbers) * torch.log1p(numbers.abs()) * LOG_SCALE
        logs = logs.masked_fill_(counts == criteo.NO_COUNT, 0.0)
        output: torch.Tensor = model(logs, x[:, criteo.COUNTS :])
        return output

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def predict(self, output: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"probability": torch.sigmoid(output)}

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"accuracy": float(((output > 0) == target).double().mean())}

    def holdout(self) -> Iterable[Sample]:
        if self.holdout_path is None:
            return ()
        held_out = itertools.islice(lines.read_file(Path(self.holdout_path)), self.holdout_samples)
        return [self.decode(line) for line in held_out]

    def _samples(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """x and y of packed records, shape (n,) of dtype `criteo.RECORD`."""
        x = np.empty((len(rows), criteo.COUNTS + criteo.CATEGORIES), np.int32)
        x[:, : criteo.COUNTS] = rows["counts"]
        x[:, criteo.COUNTS :] = columns_of(rows["categories"], self.columns)
        return x, rows["label"].astype(np.int64)


class SparseLinear(nn.Module):
    """One number for each sample: a bias, a weight for each number, and a weight for each id of a table."""

    def __init__(self, numbers: int, columns: int, *, sparse: bool, bounded: bool = False) -> None:
        super().__init__()
        self.table = BoundedEmbedding(columns, 1, scale=0.0) if bounded else nn.Embedding(columns, 1, sparse=sparse)
        self.dense = nn.Linear(numbers, 1)
        # The loss is convex: it is learned from nothing, so that no weight is there that no sample asked for.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shape (n,), of `numbers`, float32 of shape (n, numbers), and `ids`, integers of shape (n, k)."""
        if self.table.sparse:
            weights = self.table(ids).squeeze(2)
        else:  # the same weights: the gradient of rows of one number takes a third of the time so
            weights = self.table.weight.view(-1).index_select(0, ids.reshape(-1)).view(ids.shape)
        logits: torch.Tensor = weights.sum(1) + self.dense(numbers).squeeze(1)
        return logits


def columns_of(categories: npt.NDArray[Any], columns: int) -> npt.NDArray[np.uint64]:
    """The hashed column of each category, 0 .. columns - 1: the same in every process, version and machine.

    The hash is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
    on the category's number and its place.

    Args:
        categories: numbers of 32 bits, shape (n, 26).
    """
    # Upper half times `columns`: uniform without a division, and the product has 63 bits.
    return (mix(categories.astype(np.uint64) + _SALTS) >> np.uint64(32)) * np.uint64(columns) >> np.uint64(32)


def mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The next number of SplitMix64 for each state."""
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
