"""Finds changes of the features, labels and answers of a stream, whether or not the model becomes worse. Pure.

Each column of the samples has a histogram of a first window of the stream, and the newest window is compared with it by
the population stability index. A histogram has a fixed size, whatever the window.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
import numpy as np

from doll.config.drift import InputsConfig
from doll.task import trees
from doll.task.batches import SampleBatch
from doll.task.trees import Ragged, Tree
from doll.theory.checks import Floats
from doll.theory.comparison import stability_index

EDGE_SAMPLES: Final = 1_000  # from which the bins of a column are chosen
ANSWER_SAMPLES: Final = 1_000  # of each window that are kept for the answers
_BINS: Final = 10
_MAX_WIDTH: Final = 32  # an array with more values in a sample has a mean and a deviation as its columns
_MAX_COLUMNS: Final = 256
_MOST_CHANGES: Final = 3  # in windows one after the other: such a column, a clock or a number, has no distribution

Columns = Mapping[str, Floats]  # name -> one value of each sample, shape (n,)


class InputDrift(msgspec.Struct, frozen=True, kw_only=True):
    """A column that has another distribution than before.

    Attributes:
        column: its name, such as `x[3]`, `user.age`, `y` or `answer`.
        index: the population stability index between the two windows.
        before, after: mean of its finite values in either window; NaN: there is none.
        is_last: whether the column is not watched any more, because it changes all the time.
    """

    column: str
    index: float
    before: float
    after: float
    is_last: bool = False


class Histogram(msgspec.Struct, kw_only=True):
    """The number of values of a column in each bin, and their sum.

    Attributes:
        values: the values that have a bin of their own, sorted; (): the bins are ranges.
        edges: limits between the ranges; (): the bins are values.
        counts: one for each bin; the last one has the values that are missing, and the last but one, if the bins are
            values, all other values.
    """

    values: list[float]
    edges: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of_column(cls, column: Floats) -> Histogram:
        """Choose bins for such values: the most frequent values, if these are half of all, or else the deciles."""
        finite = column[np.isfinite(column)]
        frequent = Counter(finite.tolist()).most_common(_BINS)
        if sum(count for _, count in frequent) * 2 >= len(finite):
            values, edges = sorted(value for value, _ in frequent), list[float]()
        else:
            values, edges = [], np.unique(np.quantile(finite, np.linspace(0, 1, _BINS + 1)[1:-1])).tolist()
        return cls(values=values, edges=edges, counts=[0] * (len(values or edges) + 2))

    def add(self, column: Floats) -> None:
        """Count these values."""
        finite = np.isfinite(column)
        kept, last = column[finite], len(self.counts) - 1
        if self.edges:
            bins = np.searchsorted(self.edges, kept)
        else:
            values = np.array([*self.values, math.inf])
            bins = np.searchsorted(values[:-1], kept)
            bins = np.where(values[bins] == kept, bins, last - 1)
        counts = np.bincount(bins, minlength=last)
        counts = np.append(counts, len(column) - len(kept))
        self.counts = (np.array(self.counts) + counts).tolist()
        self.sum += float(kept.sum())

    def emptied(self) -> Histogram:
        """Return a histogram with the same bins and no values."""
        return Histogram(values=self.values, edges=self.edges, counts=[0] * len(self.counts))

    @property
    def mean(self) -> float:
        count = sum(self.counts[:-1])
        return self.sum / count if count else math.nan


class Reference(msgspec.Struct):
    """The histograms of an earlier window by column, and the columns that are not watched any more. It is kept in
    a file."""

    histograms: dict[str, Histogram]
    left_out: set[str]


class InputWatch:
    """Compares the newest window of a stream with an earlier one.

    Args:
        reference: that of an earlier process; None: the first window becomes the reference.
    """

    def __init__(self, config: InputsConfig, reference: Reference | None = None) -> None:
        self._config = config
        self.reference = Reference({}, set()) if reference is None else reference
        self._changes: Counter[str] = Counter()  # one after the other
        self._first: dict[str, list[Floats]] = {}  # values of columns whose bins are not known yet
        self._window: dict[str, Histogram] = {}

    def add(self, columns: Columns) -> list[InputDrift]:
        """Take the columns of some samples. Return the columns that have changed, when their window is full."""
        known = self.reference.histograms.keys() | self._first.keys() | self._window.keys()
        drifts = []
        for name, column in columns.items():
            if self._is_left_out(name) or (name not in known and len(known) == _MAX_COLUMNS):
                continue
            known.add(name)
            if (drift := self._added(name, column)) is not None:
                drifts.append(drift)
        return drifts

    def _is_left_out(self, name: str) -> bool:
        names = (*self._config.leave_out, *self.reference.left_out)
        return any(name == left_out or name.startswith(f"{left_out}[") for left_out in names)

    def _added(self, name: str, column: Floats) -> InputDrift | None:
        histogram = self._window.get(name)
        if histogram is None:
            reference = self.reference.histograms.get(name)
            if reference is None:
                first = self._first.setdefault(name, [])
                first.append(column)
                if sum(map(len, first)) < EDGE_SAMPLES:
                    return None
                column = np.concatenate(self._first.pop(name))
                histogram = Histogram.of_column(column)
            else:
                histogram = reference.emptied()
            self._window[name] = histogram
        histogram.add(column)
        return self._compared(name, histogram) if sum(histogram.counts) >= self._config.window else None

    def _compared(self, name: str, newest: Histogram) -> InputDrift | None:
        """Compare a full window with the reference. If they differ, the next window is the reference: this one began
        before the change."""
        del self._window[name]
        reference = self.reference.histograms.get(name)
        if reference is None:
            self.reference.histograms[name] = newest
            return None
        index = stability_index(np.array(newest.counts), np.array(reference.counts))
        if index <= self._config.max_index:
            self._changes[name] = 0
            return None
        del self.reference.histograms[name]
        self._changes[name] += 1
        if is_last := self._changes[name] == _MOST_CHANGES:
            self.reference.left_out.add(name)
        return InputDrift(column=name, index=index, before=reference.mean, after=newest.mean, is_last=is_last)


class AnswerWatch:
    """Compares the answers of one model to samples of an earlier and of the newest window. So a model that learns does
    not count as a change.

    Args:
        answers: computes the columns of a model's answers to samples, with the newest weights.
    """

    def __init__(self, config: InputsConfig, answers: Callable[[SampleBatch], Columns]) -> None:
        self._config, self._answers = config, answers
        self._reference: SampleBatch | None = None

    def compare(self, newest: SampleBatch) -> list[InputDrift]:
        """Take some samples of a full window."""
        reference, drifts = self._reference, list[InputDrift]()
        if reference is not None:
            before, after = self._answers(reference), self._answers(newest)
            drifts = [
                drift for name in list(before)[:_MAX_WIDTH] if name in after
                if (drift := self._compared(name, before[name], after[name])) is not None
            ]  # fmt: skip
        if reference is None or drifts:
            self._reference = newest
        return drifts

    def _compared(self, name: str, before: Floats, after: Floats) -> InputDrift | None:
        reference = Histogram.of_column(before)
        newest = reference.emptied()
        reference.add(before)
        newest.add(after)
        index = stability_index(np.array(newest.counts), np.array(reference.counts))
        if index <= self._config.max_index:
            return None
        return InputDrift(column=name, index=index, before=reference.mean, after=newest.mean)


def columns_of(samples: SampleBatch) -> dict[str, Floats]:
    """Return the columns of features and labels. An array of more than 32 values in a sample has a mean and a deviation
    in their place, and one whose length differs a length too. What is not a number has no column."""
    return {name: column for root in ("x", "y") for name, column in _columns(root, getattr(samples, root))}


def columns_of_tree(root: str, tree: Tree) -> dict[str, Floats]:
    """Return the columns of a tree of arrays of shape (n, ...)."""
    return dict(_columns(root, tree))


def _columns(root: str, tree: Tree) -> Iterator[tuple[str, Floats]]:
    if isinstance(tree, Ragged):
        yield from _ragged_columns(root, tree)
        return
    leaves, structure = trees.flat(tree)
    for name, leaf in zip(trees.dotted_names(root, structure), leaves, strict=True):
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf":
            continue
        rows = array.reshape(len(array), -1).astype(np.float64)
        if array.ndim == 1:
            yield name, rows[:, 0]
        elif rows.shape[1] <= _MAX_WIDTH:
            yield from ((f"{name}[{at}]", rows[:, at]) for at in range(rows.shape[1]))
        else:
            yield f"{name}[mean]", rows.mean(axis=1)
            yield f"{name}[deviation]", rows.std(axis=1)


def _ragged_columns(root: str, samples: Ragged) -> Iterator[tuple[str, Floats]]:
    columns: dict[str, list[float]] = {}
    for sample in samples:
        leaves, structure = trees.flat(sample)
        for name, leaf in zip(trees.dotted_names(root, structure), leaves, strict=True):
            array = np.asarray(leaf)
            if array.dtype.kind in "biuf":
                columns.setdefault(f"{name}[length]", []).append(array.size)
                columns.setdefault(f"{name}[mean]", []).append(float(array.mean()) if array.size else math.nan)
    yield from ((name, np.array(values)) for name, values in columns.items())
