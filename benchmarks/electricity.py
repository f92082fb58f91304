"""A task on the prices of New South Wales' electricity market (Elec2): does the price go up or down?

The stream has the half-hours in the order of time, one of each `HOLDOUT` held out; worker n of N reads every Nth line.
"""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from doll import Sample, Task
from doll.errors import SampleError
from doll.producers.sources import Stream
from torch import nn
from torch.nn import functional as F

PATH: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "electricity" / "elec.csv.gz"
HOLDOUT: Final = 10
FEATURES: Final = 8
_RECORD: Final = np.dtype([("x", "<f4", (FEATURES,)), ("is_up", "u1")])


class Electricity(Task):
    """Classifies a half-hour as UP or DOWN with a perceptron. x: the eight numbers of a line."""

    input_shape = (FEATURES,)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)
        )  # fmt: skip

    def decode(self, record: bytes) -> Sample:
        if len(record) != _RECORD.itemsize:
            raise SampleError(f"expected {_RECORD.itemsize} bytes, got {len(record)}")
        value = np.frombuffer(record, _RECORD)[0]
        return Sample(value["x"].copy(), int(value["is_up"]))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
        return {"accuracy": float((output.argmax(1) == target).float().mean())}

    def holdout(self) -> Iterable[Sample]:
        return [self.decode(record.tobytes()) for record in _lines()[::HOLDOUT]]


@cache
def _lines() -> npt.NDArray[np.void]:
    with gzip.open(PATH, "rt", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    lines = np.zeros(len(rows), _RECORD)
    lines["x"] = [row[:FEATURES] for row in rows]
    lines["x"] = (lines["x"] - lines["x"].mean(axis=0)) / lines["x"].std(axis=0)
    lines["is_up"] = [row[-1] == "UP" for row in rows]
    return lines


def samples(stream: Stream) -> Iterator[bytes]:
    """Yield the lines of a stream in the order of time, again and again."""
    lines = _lines()
    mine = np.delete(lines, np.s_[::HOLDOUT])[stream.number :: stream.count]
    return itertools.cycle([line.tobytes() for line in mine])
