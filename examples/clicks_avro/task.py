"""Click-through on an Avro stream: 13 counts and 26 hashed categories, for records with different schemas.

Run as a program, it prints made-up clicks as lines in Criteo's format: python task.py 20000
"""

from __future__ import annotations

import math
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from doll import FieldsTask
from torch import nn

COUNTS, CATEGORIES = 13, 26
Count = Annotated[float, msgspec.Meta(ge=-3)]  # the published file has counts down to -3


class Click(msgspec.Struct):
    """The used fields of a record, by name; other fields of a schema are ignored."""

    clicked: bool
    counts: Annotated[list[Count | None], msgspec.Meta(min_length=COUNTS, max_length=COUNTS)]
    categories: Annotated[list[str | None], msgspec.Meta(min_length=CATEGORIES, max_length=CATEGORIES)]


class Clicks(FieldsTask):
    """Predicts whether an impression is clicked. x: the logarithms of the counts, then the columns of the categories.

    Args:
        columns: number of columns that the categories are hashed into.
    """

    record = Click
    input_shape = (COUNTS + CATEGORIES,)
    num_classes = 2

    def __init__(self, columns: int = 65_536) -> None:
        if not 0 < columns <= 2**24:  # x is float32, which holds whole numbers up to this one
            raise ValueError(f"columns: expected 1 to {2**24}, got {columns}")
        self.columns = columns

    def build_model(self) -> nn.Module:
        return HashedLinear(self.columns)

    def samples(self, columns: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        x = np.empty((len(columns["clicked"]), COUNTS + CATEGORIES), np.float32)
        counts = np.nan_to_num(np.array(columns["counts"].tolist(), np.float64))  # None: 0
        x[:, :COUNTS] = np.sign(counts) * np.log1p(np.abs(counts)) / 4
        x[:, COUNTS:] = [
            [self.column(place, value) for place, value in enumerate(row)] for row in columns["categories"]
        ]
        return x, columns["clicked"].astype(np.int64)

    def column(self, place: int, value: str | None) -> int:
        """Return the column of a category. The hash is equal in every process, unlike Python's own hash of a text."""
        return zlib.crc32(f"{place}={value}".encode()) % self.columns

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"accuracy": float(((output > 0) == target).double().mean())}


class HashedLinear(nn.Module):
    """Logistic regression: a bias, a weight for each count, and one for each column."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.table, self.counts = nn.EmbeddingBag(columns, 1, mode="sum"), nn.Linear(COUNTS, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(x[:, COUNTS:].long()) + self.counts(x[:, :COUNTS])
        return logits.squeeze(1)


def made_up(count: int) -> Iterator[str]:
    """Yield lines in Criteo's format: label, 13 counts, 26 categories in hex, separated by tabs; cells may be empty."""
    rng = random.Random(0)
    weights = [[rng.gauss(0, 0.6) for _ in range(200)] for _ in range(CATEGORIES)]
    for _ in range(count):
        counts = [int(rng.lognormvariate(1.5, 1.2)) if rng.random() < 0.8 else None for _ in range(COUNTS)]
        ranks = [min(199, int(rng.paretovariate(0.8)) - 1) for _ in range(CATEGORIES)]
        logit = 0.3 * math.log1p(counts[0] or 0) - 1.5 + sum(map(list.__getitem__, weights, ranks))
        cells = ["" if value is None else str(value) for value in counts]
        cells += [f"{zlib.crc32(b'%d/%d' % at):08x}" for at in enumerate(ranks)]
        yield "\t".join([str(int(rng.random() < 1 / (1 + math.exp(-logit)))), *cells])


if __name__ == "__main__":
    for line in made_up(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
        sys.stdout.write(line + "\n")
