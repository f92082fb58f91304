"""AUC and average precision (PR-AUC): their state is a table of scores with the weights of both classes. Pure.

The table is exact up to a number of distinct scores. Above it, scores that are next to each other share a row: a score
is replaced by the leading bits of its float64, as many as give few enough rows. The rows depend only on the set of
scores, so states merge to the same table in any order. Small probabilities keep their relative precision.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from doll.metrics.states import Floats, MetricState, columns

Keys = npt.NDArray[np.int64]

MAX_SCORES: Final = 1024
MAX_SCORES_IN_MEMORY: Final = 65_536


class _Table(NamedTuple):
    """Rows in ascending order of scores.

    Attributes:
        keys: the leading bits of each score, strictly ascending, shape (rows,).
        positive, negative: weights of the samples of both classes, shape (rows,).
        shift: number of bits that are left out.
        max_scores: maximum number of rows.
        squares: sums of the squares of the weights of both classes.
        invalid: weight of the samples whose score is NaN.
    """

    keys: Keys
    positive: Floats
    negative: Floats
    shift: int
    max_scores: int
    squares: tuple[float, float]
    invalid: float

    def grouped(self) -> _Table:
        """Return the table with each key once, and as many leading bits as `max_scores` allows."""
        keys, row = np.unique(self.keys, return_inverse=True)
        positive, negative = (np.bincount(row, of).astype(np.float64) for of in (self.positive, self.negative))
        table = self._replace(keys=keys, positive=positive, negative=negative)
        if len(keys) <= self.max_scores:
            return table
        return table._replace(keys=keys >> 1, shift=self.shift + 1).grouped()


def _keys_of(scores: Floats) -> Keys:
    """Return integers in the order of the scores: the bits of a float64, of which negative numbers are mirrored."""
    bits = (scores + 0.0).view(np.int64)  # -0.0 becomes 0.0
    mirrored: Keys = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
    return mirrored


class _Ranking(MetricState):
    """A metric of a table of scores."""

    def __init__(self, table: _Table) -> None:
        self._table = table

    @classmethod
    def from_samples(cls, score: Any, target: Any, weight: Any, max_scores: int) -> Self:
        if not 2 <= max_scores <= MAX_SCORES_IN_MEMORY:
            raise ValueError(f"max_scores: expected 2 to {MAX_SCORES_IN_MEMORY:,}, got {max_scores}")
        score, target, weight = columns(cls.kind, score, target, weight=weight)
        if not np.isin(target, (0.0, 1.0)).all():
            raise ValueError(f"{cls.kind}: expected labels 0 or 1, got {np.setdiff1d(target, (0, 1))[:3].tolist()}")
        known = ~np.isnan(score)
        invalid = float(weight[~known].sum())
        positive, negative = (np.where(target == label, weight, 0.0)[known] for label in (1, 0))
        squares = (float(positive @ positive), float(negative @ negative))
        return cls(_Table(_keys_of(score[known]), positive, negative, 0, max_scores, squares, invalid).grouped())

    def merge(self, *others: Self) -> Self:
        tables = [self._table, *(other._table for other in others)]
        shift = max(table.shift for table in tables)
        keys = np.concatenate([table.keys >> (shift - table.shift) for table in tables])
        positive = np.concatenate([table.positive for table in tables])
        negative = np.concatenate([table.negative for table in tables])
        squares = (sum(table.squares[0] for table in tables), sum(table.squares[1] for table in tables))
        most, invalid = max(table.max_scores for table in tables), sum(table.invalid for table in tables)
        return type(self)(_Table(keys, positive, negative, shift, most, squares, invalid).grouped())

    def faded(self, factor: float) -> Self:
        table = self._table
        squares = (table.squares[0] * factor**2, table.squares[1] * factor**2)
        return type(self)(
            table._replace(
                positive=table.positive * factor, negative=table.negative * factor, squares=squares,
                invalid=table.invalid * factor,
            )
        )  # fmt: skip

    def in_memory(self) -> Self:
        return type(self)(self._table._replace(max_scores=MAX_SCORES_IN_MEMORY))

    def encode(self) -> list[Any]:
        table, weights = self._table, (self._table.positive.tolist(), self._table.negative.tolist())
        short = [[int(x) if x.is_integer() else x for x in column] for column in weights]  # whole numbers are short
        return [table.keys.tolist(), *short, table.shift, table.max_scores, list(table.squares), table.invalid]

    @classmethod
    def decode(cls, content: Any) -> Self:
        keys, positive, negative, shift, most, squares, invalid = content
        rows = np.array(keys, dtype=np.int64), np.array(positive, dtype=float), np.array(negative, dtype=float)
        numbers = np.array([*squares, invalid], dtype=float)
        if not (
            (type(shift), type(most)) == (int, int)
            and 0 <= shift <= 63
            and all(array.shape == rows[0].shape == (len(keys),) for array in rows)
            and max(2, len(keys)) <= most <= MAX_SCORES_IN_MEMORY
            and (rows[0][1:] > rows[0][:-1]).all() and np.isin(rows[0] >> (63 - shift), (-1, 0)).all()
            and len(squares) == 2
            and all((np.isfinite(array) & (array >= 0)).all() for array in (*rows[1:], numbers))
        ):  # fmt: skip
            raise ValueError(f"{cls.kind}: expected ascending scores with weights of 0 or more")
        return cls(_Table(*rows, shift, most, (float(numbers[0]), float(numbers[1])), float(numbers[2])))

    def _classes(self) -> tuple[Floats, Floats] | None:
        """Return the shares of the positives and the negatives by row; None if a class is empty or a score is NaN."""
        positives, negatives = self._table.positive.sum(), self._table.negative.sum()
        if self._table.invalid or not (positives > 0 and negatives > 0):
            return None
        return self._table.positive / positives, self._table.negative / negatives


class Auc(_Ranking):
    """The area under the ROC curve."""

    kind = "auc"

    def compute(self) -> float:
        if (classes := self._classes()) is None:
            return math.nan
        positive, negative = classes
        return float(positive @ (np.cumsum(negative) - negative / 2))

    def stderr(self) -> float:
        """Return the standard error of DeLong et al. (1988), with the effective number (sum w)² / sum w² of samples."""
        if (classes := self._classes()) is None:
            return math.nan
        positive, negative = classes
        area = self.compute()
        below, above = np.cumsum(negative) - negative / 2, 1 - np.cumsum(positive) + positive / 2
        variances = positive @ (below - area) ** 2, negative @ (above - area) ** 2
        totals = self._table.positive.sum(), self._table.negative.sum()
        sizes = [float(total**2 / square) for total, square in zip(totals, self._table.squares, strict=True)]
        return math.sqrt(sum(variances / (np.array(sizes) - 1))) if min(sizes) > 1 else math.nan

    def error_bound(self) -> float:
        """Return half the share of the pairs whose order is not known, because both are in one row."""
        classes = self._classes()
        return 0.0 if classes is None or not self._table.shift else float(classes[0] @ classes[1]) / 2


class AveragePrecision(_Ranking):
    """The sum of the precisions at each threshold, each times its step of the recall; without a standard error."""

    kind = "average_precision"

    def _precisions(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return for the rows from the highest score: share of the positives, precision, and its bounds in the row."""
        positive, negative = self._table.positive[::-1], self._table.negative[::-1]
        tp, fp = np.cumsum(positive), np.cumsum(negative)
        with np.errstate(invalid="ignore", divide="ignore"):
            precision = tp / (tp + fp)
            if self._table.shift:  # the mean precision in a row, if its samples are evenly mixed
                row, before = positive + negative, tp + fp - positive - negative
                rest = (tp - positive - positive * before / row) / row * np.log1p(row / before)
                precision = np.where(before > 0, positive / row + rest, precision)
            lowest, highest = (tp - positive) / (tp - positive + fp), tp / (tp + fp - negative)
        return positive / positive.sum(), precision, np.nan_to_num(lowest), highest

    def compute(self) -> float:
        if self._classes() is None:
            return math.nan
        share, precision, _, _ = self._precisions()
        return float(share[share > 0] @ precision[share > 0])

    def error_bound(self) -> float:
        """Return the error if the samples of each row are in the worst order."""
        if not self._table.shift or self._classes() is None:
            return 0.0
        share, precision, lowest, highest = (column[self._table.positive[::-1] > 0] for column in self._precisions())
        return float(max(share @ (precision - lowest), share @ (highest - precision)))


def auc(score: Any, target: Any, weight: Any = None, *, max_scores: int = MAX_SCORES) -> Auc:
    """Return the area under the ROC curve; ties count half.

    Args:
        score: any numbers of which larger ones mean label 1, shape (n,).
        target: labels 0 or 1, shape (n,).
        max_scores: maximum number of distinct scores of an exact state; `MetricState.error_bound` bounds the error
            above it. A state of more than about 4,000 scores is too long for a record.
    """
    return Auc.from_samples(score, target, weight, max_scores)


def average_precision(score: Any, target: Any, weight: Any = None, *, max_scores: int = MAX_SCORES) -> AveragePrecision:
    """Return the average precision, the usual form of PR-AUC. For the arguments see `auc`."""
    return AveragePrecision.from_samples(score, target, weight, max_scores)
