"""Logistic regression on clicks in Criteo's format: 13 numbers and 26 hashed categories.

The model is that of MLLess (Sarroca, Sanchez-Artigas: MLLess, 2023): 13 weights and `columns` hashed ones. Every
transform is fixed in advance, so no transform uses records that a live stream has not shown yet.

A line in Criteo's format has tabs between its cells: the label (1: clicked), 13 counts, and 26 categories as 32-bit
numbers in hex. Counts and categories may be empty. The packed record is `RECORD`: it has 157 bytes instead of about
240, and needs no parsing. The stream is made up, with a known lowest log-loss (`bayes_log_loss`), or read from a file.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from doll import BoundedEmbedding, Sample, Task
from doll.errors import BadRecordsError, SampleError
from doll.producers.sources import Stream
from doll.records import lines as line_files
from doll.task.records import values_of
from torch import nn

COUNTS: Final = 13
CATEGORIES: Final = 26
LOWEST_COUNT: Final = -3  # the second count of the published file has values down to -3
HIGHEST_COUNT: Final = 2**31 - 1
NO_COUNT: Final = -(2**31)  # value of an empty cell
NO_CATEGORY: Final = 0  # value of an empty cell; a category whose number is 0 counts as an empty cell

RECORD: Final = np.dtype([("label", "u1"), ("counts", "<i4", COUNTS), ("categories", "<u4", CATEGORIES)])

_CELLS: Final = 1 + COUNTS + CATEGORIES
_PACKED: Final = struct.Struct(f"<B{COUNTS}i{CATEGORIES}I")
_COUNT: Final = rb"-[1-3]|[0-9]{1,10}"
_CATEGORY: Final = rb"[0-9a-fA-F]{1,8}"
_LINE: Final = re.compile(
    rb"[01](?:\t(?:%b)?){%d}(?:\t(?:%b)?){%d}" % (_COUNT, COUNTS, _CATEGORY, CATEGORIES)
)  # fmt: skip
_SHOWN: Final = 40  # number of bytes of a cell in an error message

LOG_SCALE: Final = 0.25  # with this factor, counts of some thousands become about 2
_BLOCK: Final = 1024
_NO_COUNT_SHARE: Final = 0.2
_COUNT_WEIGHT: Final = 0.2  # standard deviation
_CATEGORY_WEIGHT: Final = 0.8  # standard deviation of the weights that are not 0
_BIAS: Final = -1.0
_LARGEST_LOG: Final = 20.0
_ODD: Final = np.uint32(0x9E3779B1)

_MOST_DENSE_COLUMNS: Final = 1_000_000
_MOST_COLUMNS: Final = 2**31 - 1
_SALTS: Final = np.arange(1, CATEGORIES + 1, dtype=np.uint64) << np.uint64(32)


class Clicks(Task):
    """Predicts whether an impression is clicked. Records are packed records (`RECORD`) or lines in Criteo's format.

    x of a sample: int32, shape (39,): the 13 counts, then the columns of the 26 categories. The model uses the
    logarithms of the counts c, `sign(c) ln(1 + |c|) / 4`, and 0 for a missing count.

    Args:
        columns: number of columns that the categories are hashed into. A missing category also has a column.
        sparse: whether to keep the columns as a table at the server, and send only the columns of a batch; None: above
            1,000,000 columns.
        bounded: whether the table has rows only for used columns; `training.tables` sets the number of rows.
        holdout_path: file of held-out lines in Criteo's format; None: no held-out set.
        holdout_samples: number of its first lines to use.
    """

    input_shape = (COUNTS + CATEGORIES,)
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
        return SparseLinear(COUNTS, self.columns, sparse=self.sparse, bounded=self.bounded)

    def decode(self, record: bytes) -> Sample:
        packed = record if is_packed(record) else pack_line(record)
        if problem := problem_of(packed):
            raise SampleError(problem)
        x, y = self._samples(np.frombuffer(packed, RECORD))
        return Sample(x[0], y[0])

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        if width != RECORD.itemsize:
            return None
        rows = np.frombuffer(block, RECORD)
        return self._samples(rows) if check(rows).all() else None  # `decode` reports the error

    def decode_many(self, values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        packed, bad = [], []
        for at, value in enumerate(values):
            try:
                packed.append(value if is_packed(value) else pack_line(value))
            except SampleError:
                bad.append(at)
        if bad:
            raise BadRecordsError(bad)
        rows = np.frombuffer(b"".join(packed), RECORD)
        if not (good := check(rows)).all():
            raise BadRecordsError(np.flatnonzero(~good))
        return self._samples(rows)

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        counts = x[:, :COUNTS]
        numbers = counts.float()
        logs = torch.sign(numbers) * torch.log1p(numbers.abs()) * LOG_SCALE
        logs = logs.masked_fill_(counts == NO_COUNT, 0.0)
        output: torch.Tensor = model(logs, x[:, COUNTS:])
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
        held_out = itertools.islice(line_files.read_file(Path(self.holdout_path)), self.holdout_samples)
        return [self.decode(line) for line in held_out]

    def _samples(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return x and y of packed records, shape (n,) of dtype `RECORD`."""
        x = np.empty((len(rows), COUNTS + CATEGORIES), np.int32)
        x[:, :COUNTS] = rows["counts"]
        x[:, COUNTS:] = columns_of(rows["categories"], self.columns)
        return x, rows["label"].astype(np.int64)


class SparseLinear(nn.Module):
    """A linear model with one output per sample: a bias, a weight for each number, and one for each id of a table."""

    def __init__(self, numbers: int, columns: int, *, sparse: bool, bounded: bool = False) -> None:
        super().__init__()
        self.table = BoundedEmbedding(columns, 1, scale=0.0) if bounded else nn.Embedding(columns, 1, sparse=sparse)
        self.dense = nn.Linear(numbers, 1)
        # The loss is convex, so weights start at 0: only weights of ids that occurred in samples differ from 0.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return outputs, shape (n,), for `numbers`, float32, shape (n, numbers), and `ids`, integers, shape (n, k)."""
        if self.table.sparse:
            weights = self.table(ids).squeeze(2)
        else:  # the same weights; in this form, the gradient of rows with one number takes a third of the time
            weights = self.table.weight.view(-1).index_select(0, ids.reshape(-1)).view(ids.shape)
        logits: torch.Tensor = weights.sum(1) + self.dense(numbers).squeeze(1)
        return logits


def columns_of(categories: npt.NDArray[Any], columns: int) -> npt.NDArray[np.uint64]:
    """Return the hashed column of each category, 0 .. columns - 1; equal in every process, version and machine.

    The hash is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014),
    applied to the category's number and place.

    Args:
        categories: 32-bit numbers, shape (n, 26).
    """
    # Upper half times `columns`: uniform without a division, and the product has at most 63 bits.
    return (mix(categories.astype(np.uint64) + _SALTS) >> np.uint64(32)) * np.uint64(columns) >> np.uint64(32)


def mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the next number of SplitMix64 for each state."""
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


# --- Criteo's format


def pack_line(line: bytes) -> bytes:
    """Return the packed record of a line.

    Raises:
        SampleError: the line does not have 40 cells, or a cell is not valid.
    """
    line = line.rstrip(b"\r\n")
    if _LINE.fullmatch(line):
        label, *cells = line.split(b"\t")
        counts = [int(cell) if cell else NO_COUNT for cell in cells[:COUNTS]]
        if max(counts) <= HIGHEST_COUNT:
            categories = [int(cell, 16) if cell else NO_CATEGORY for cell in cells[COUNTS:]]
            return _PACKED.pack(int(label), *counts, *categories)
    raise SampleError(_problem(line))


def _problem(line: bytes) -> str:
    """Return the problem of a line that `pack_line` refuses."""
    cells = line.split(b"\t")
    if len(cells) != _CELLS:
        return (
            f"expected a packed record of {RECORD.itemsize} bytes, or {_CELLS} cells with tabs between (label, "
            f"{COUNTS} counts, {CATEGORIES} categories), got {len(cells)} cells in {len(line)} bytes"
        )
    if cells[0] not in (b"0", b"1"):
        return f"expected 0 or 1 in cell 1 (the label), got {cells[0][:_SHOWN]!r}"
    for at, cell in enumerate(cells[1 : COUNTS + 1], 2):
        if cell and not (re.fullmatch(_COUNT, cell) and int(cell) <= HIGHEST_COUNT):
            return (
                f"cell {at}: expected a count of {LOWEST_COUNT} to {HIGHEST_COUNT}, or nothing; got {cell[:_SHOWN]!r}"
            )
    for at, cell in enumerate(cells[COUNTS + 1 :], COUNTS + 2):
        if cell and not re.fullmatch(_CATEGORY, cell):
            return f"cell {at}: expected a category of 1 to 8 hex digits, or nothing; got {cell[:_SHOWN]!r}"
    raise AssertionError("the line is good")


def is_packed(record: bytes) -> bool:
    """Return whether a record has the form of a packed one: its length fits, and it does not begin as text does."""
    return len(record) == RECORD.itemsize and record[0] < ord(" ")


def check(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which packed records are valid: the label is 0 or 1, and no count is below the lowest count.

    Args:
        rows: records of dtype `RECORD`, shape (n,).

    Returns:
        Booleans, shape (n,).
    """
    counts = rows["counts"]
    good: npt.NDArray[np.bool_] = (rows["label"] <= 1) & ((counts >= LOWEST_COUNT) | (counts == NO_COUNT)).all(axis=1)
    return good


def problem_of(record: bytes) -> str:
    """Return the problem of a packed record that `check` does not accept; "" if there is none."""
    row = np.frombuffer(record, RECORD)[0]
    if row["label"] > 1:
        return f"expected 0 or 1 in the first byte (the label), got {row['label']}"
    for at, count in enumerate(row["counts"].tolist(), 1):
        if count < LOWEST_COUNT and count != NO_COUNT:
            return f"count {at}: expected {LOWEST_COUNT} to {HIGHEST_COUNT}, or {NO_COUNT} for none; got {count}"
    return ""


def records(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the packed records of these lines, in order. A line that is not valid becomes a record without changes: a
    worker refuses it, and stores it as a dead letter."""
    for line in lines:
        try:
            yield pack_line(line)
        except SampleError:
            yield line


# --- made-up clicks


@dataclass(frozen=True)
class Truth:
    """The distribution that clicks are drawn from. Streams that share it learn the same concept.

    The logit of a click is the bias, plus the weights of its categories, plus, for each count c that is present, its
    weight times `LOG_SCALE` ln(1 + c). The example `clicks` can learn this model, except for categories that share a
    column of its table.

    Attributes:
        bias: bias of the logit.
        category_weights: float32, shape (26, categories); most are 0.
        count_weights: float64, shape (13,).
        count_logs: mean of ln(1 + c) of each count c, shape (13,).
        cumulative: P(rank <= r) of a category's rank r = 0, 1, ..., shape (categories,).
    """

    bias: float
    category_weights: npt.NDArray[np.float32]
    count_weights: npt.NDArray[np.float64]
    count_logs: npt.NDArray[np.float64]
    cumulative: npt.NDArray[np.float64]


def draw_truth(categories: int, zipf: float, density: float, rng: np.random.Generator) -> Truth:
    """Draw the distribution of a job.

    Args:
        categories: number of values of each of the 26 categories.
        zipf: exponent: the value of rank r = 1, 2, ... has a probability proportional to r ** -zipf; 0: all are equal.
        density: share of the category weights that are not 0.
    """
    weights = rng.normal(0.0, _CATEGORY_WEIGHT, (CATEGORIES, categories))
    weights[rng.random((CATEGORIES, categories)) >= density] = 0.0
    shares = np.arange(1, categories + 1, dtype=np.float64) ** -zipf
    cumulative = shares.cumsum() / shares.sum()
    count_weights = rng.normal(0.0, _COUNT_WEIGHT / LOG_SCALE, COUNTS)
    count_logs = rng.uniform(0.5, 5.0, COUNTS)
    # The mean of the logit does not depend on the drawn weights of the counts.
    bias = _BIAS - (1 - _NO_COUNT_SHARE) * LOG_SCALE * float(count_weights @ count_logs)
    return Truth(bias, weights.astype(np.float32), count_weights, count_logs, cumulative)


def draw(truth: Truth, count: int, rng: np.random.Generator) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """Draw clicks of dtype `RECORD`, shape (count,), and return them and their probabilities, shape (count,)."""
    ranks = np.searchsorted(truth.cumulative, rng.random((count, CATEGORIES)), side="right")
    np.minimum(ranks, len(truth.cumulative) - 1, out=ranks)  # the last sum may be slightly below 1
    logs = np.clip(rng.normal(truth.count_logs, 1.0, (count, COUNTS)), 0.0, _LARGEST_LOG)
    counts = np.floor(np.expm1(logs)).astype(np.int32)
    absent = rng.random((count, COUNTS)) < _NO_COUNT_SHARE
    scaled = np.where(absent, 0.0, LOG_SCALE * np.log1p(counts))
    logits = truth.bias + truth.category_weights[np.arange(CATEGORIES), ranks].sum(axis=1, dtype=np.float64)
    logits += scaled @ truth.count_weights
    probabilities = 1.0 / (1.0 + np.exp(-logits))
    rows = np.empty(count, RECORD)
    rows["label"] = rng.random(count) < probabilities
    rows["counts"] = np.where(absent, NO_COUNT, counts)
    rows["categories"] = names(ranks)
    return rows, probabilities


def names(ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return the 32-bit number of each category, shape (n, 26). Ranks of one column have different numbers."""
    # Multiplying by an odd number and adding are one-to-one modulo 2**32.
    columns = np.arange(1, CATEGORIES + 1, dtype=np.uint32) * np.uint32(0x85EBCA77)
    return (ranks.astype(np.uint32) + np.uint32(1)) * _ODD + columns


def bayes_log_loss(truth: Truth, rng: np.random.Generator, count: int = 200_000) -> float:
    """Estimate the expected log-loss of the true probabilities, in nats, from `count` clicks."""
    total = 0.0
    for at in range(0, count, _BLOCK):
        p = draw(truth, min(_BLOCK, count - at), rng)[1]
        total -= float((p * np.log(p) + (1 - p) * np.log1p(-p)).sum())
    return total / count


def drawn(truth: Truth, rng: np.random.Generator) -> Iterator[bytes]:
    """Yield packed records endlessly."""
    while True:
        yield from values_of(draw(truth, _BLOCK, rng)[0])


# --- the stream (`source.of` of the job file)


def made_up(stream: Stream, categories: int = 1000, zipf: float = 1.1, density: float = 0.3) -> Iterator[bytes]:
    """Yield clicks of known probability; the arguments are those of `draw_truth`."""
    return drawn(draw_truth(categories, zipf, density, stream.shared_rng()), stream.rng())


def from_file(stream: Stream, clicks_path: str, repeat: bool = False) -> Iterator[bytes]:
    """Yield the lines of a file in Criteo's format as packed records; line i goes to stream i mod N."""
    read = line_files.read_file(Path(clicks_path), repeat=repeat, max_bytes=stream.max_record_bytes)
    return records(itertools.islice(read, stream.number, None, stream.count))
