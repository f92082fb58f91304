"""Metrics that are functions of sums over the samples: their states are a few numbers, and merge exactly. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Final, Self

import numpy as np

from doll.metrics.states import Floats, MetricState, as_array, columns

_NO_GROUP: Final = -(2**63)  # `doll.task.forms.NO_GROUP`
_SMALLEST: Final = float(np.finfo(np.float64).eps)  # as in scikit-learn's log_loss


class _Sums(MetricState):
    """A state of `size` sums."""

    size: ClassVar[int]
    powers: ClassVar[tuple[int, ...]]  # of the samples' weights in each sum

    def __init__(self, sums: Iterable[Any]) -> None:
        self.sums = tuple(map(float, sums))

    def merge(self, *others: Self) -> Self:
        with np.errstate(over="ignore", invalid="ignore"):
            return type(self)(np.sum([self.sums, *(other.sums for other in others)], axis=0).tolist())

    def faded(self, factor: float) -> Self:
        return type(self)(value * factor**power for value, power in zip(self.sums, self.powers, strict=True))

    def encode(self) -> list[float]:
        return list(self.sums)

    @classmethod
    def decode(cls, content: Any) -> Self:
        if (
            not isinstance(content, list)
            or len(content) != cls.size
            or not all(type(x) in (int, float) for x in content)
        ):
            raise ValueError(f"{cls.kind}: expected {cls.size} numbers")
        return cls(content)


class Mean(_Sums):
    """A weighted mean. Sums: w, w v, w², w² v, w² v²."""

    kind = "mean"
    size = 5
    powers = (1, 1, 2, 2, 2)

    @classmethod
    def from_values(cls, values: Floats, weight: Floats) -> Self:
        square = weight * weight
        return cls([weight.sum(), weight @ values, square.sum(), square @ values, square @ values**2])

    def compute(self) -> float:
        return _ratio(self.sums[1], self.sums[0])

    def stderr(self) -> float:
        total, _, w2, w2_v, w2_v2 = self.sums
        mean = Mean.compute(self)
        return _ratio(_root(w2_v2 - 2 * mean * w2_v + mean * mean * w2), total)


class Rmse(Mean):
    """The root of a mean of squares, with the standard error of the delta method."""

    kind = "rmse"

    def compute(self) -> float:
        return _root(super().compute())

    def stderr(self) -> float:
        return _ratio(super().stderr(), 2 * self.compute())


class NormalizedEntropy(_Sums):
    """The mean log-loss over the entropy of the mean label, whose error is not counted. Sums: those of `Mean`, w y."""

    kind = "normalized_entropy"
    size = 6
    powers = (*Mean.powers, 1)

    def _entropy(self) -> float:
        p = _ratio(self.sums[5], self.sums[0])
        return -(p * math.log(p) + (1 - p) * math.log(1 - p)) if 0 < p < 1 else math.nan

    def compute(self) -> float:
        return _ratio(Mean(self.sums[:5]).compute(), self._entropy())

    def stderr(self) -> float:
        return _ratio(Mean(self.sums[:5]).stderr(), self._entropy())


class Calibration(_Sums):
    """The sum of predictions over that of labels. Sums: w, w p, w y, w² p², w² p y, w² y². Its error is linearised."""

    kind = "calibration"
    size = 6
    powers = (1, 1, 1, 2, 2, 2)

    def compute(self) -> float:
        return _ratio(self.sums[1], self.sums[2])

    def stderr(self) -> float:
        ratio, (_, _, labels, pp, py, yy) = self.compute(), self.sums
        return _ratio(_root(pp - 2 * ratio * py + ratio * ratio * yy), labels)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _root(value: float) -> float:
    """Return the square root; 0 for values that rounding has made negative."""
    return math.sqrt(max(value, 0.0)) if not math.isnan(value) else math.nan


def mean(values: Any, weight: Any = None) -> Mean:
    """Return the mean of one value for each sample, with its standard error."""
    return Mean.from_values(*columns("mean", values, weight=weight))


def accuracy(output: Any, target: Any, weight: Any = None) -> Mean:
    """Return the share of right answers.

    Args:
        output: shape (n, classes): the largest value counts; or (n,): the probability of class 1, which is answered
            from 0.5.
    """
    output = as_array(output)
    answers = output.argmax(axis=1) if output.ndim == 2 else output >= 0.5
    answers, target, weight = columns("accuracy", answers, target, weight=weight)
    return Mean.from_values((answers == target).astype(np.float64), weight)


def log_loss(probability: Any, target: Any, weight: Any = None) -> Mean:
    """Return the mean of -log p of the target.

    Args:
        probability: of class 1, shape (n,), or of each class, shape (n, classes). Not logits.
    """
    probability = as_array(probability)
    if probability.ndim == 2:
        chosen = probability[np.arange(len(probability)), as_array(target).astype(np.int64)]
        chosen, weight = columns("log_loss", chosen, weight=weight)
    else:
        chosen, target, weight = columns("log_loss", probability, target, weight=weight)
        chosen = np.where(target > 0, chosen, 1 - chosen)
    if (np.abs(chosen - 0.5) > 0.501).any():  # a probability of few bits may be a little outside of 0 to 1
        raise ValueError("log_loss: expected probabilities, got numbers below 0 or above 1: use sigmoid or softmax")
    return Mean.from_values(-np.log(np.clip(chosen, _SMALLEST, 1 - _SMALLEST)), weight)


def normalized_entropy(probability: Any, target: Any, weight: Any = None) -> NormalizedEntropy:
    """Return the normalised entropy (He et al., ADKDD 2014, equation 1): 1 is as good as always the mean label.

    Args:
        probability: of label 1, shape (n,). Not logits.
    """
    sums = log_loss(probability, target, weight).sums
    target, weight = columns("normalized_entropy", target, weight=weight)
    return NormalizedEntropy([*sums, weight @ target])


def calibration(probability: Any, target: Any, weight: Any = None) -> Calibration:
    """Return the sum of predictions over the sum of labels; 1 is best."""
    p, y, w = columns("calibration", probability, target, weight=weight)
    square = w * w
    return Calibration([w.sum(), w @ p, w @ y, square @ p**2, square @ (p * y), square @ y**2])


def rmse(prediction: Any, target: Any, weight: Any = None) -> Rmse:
    """Return the root of the mean squared error."""
    prediction, target, weight = columns("rmse", prediction, target, weight=weight)
    return Rmse.from_values((prediction - target) ** 2, weight)


def pinball_loss(prediction: Any, target: Any, quantile: float, weight: Any = None) -> Mean:
    """Return the mean pinball loss of predictions of a quantile, such as 0.9."""
    if not 0 < quantile < 1:
        raise ValueError(f"pinball_loss: expected a quantile between 0 and 1, got {quantile}")
    prediction, target, weight = columns("pinball_loss", prediction, target, weight=weight)
    above = target - prediction
    return Mean.from_values(np.maximum(quantile * above, (quantile - 1) * above), weight)


def ndcg(score: Any, relevance: Any, group: Any, k: int | None = None) -> Mean:
    """Return the mean over the groups of the normalised discounted cumulative gain at rank `k` (None: all ranks).

    Gains are the relevances, and ties count as in scikit-learn's `ndcg_score`. A group must be in one batch: the parts
    of a group in two batches count as two groups.

    Args:
        group: group ids, shape (n,), as `Task.metrics` gets them. Samples without a group do not count.
    """
    if group is None:
        return Mean([0.0] * Mean.size)
    score, relevance, _ = columns("ndcg", score, relevance)
    group = as_array(group).reshape(-1)
    if len(group) != len(score):
        raise ValueError(f"ndcg: expected one group for each of {len(score)} samples, got {len(group)}")
    kept = np.flatnonzero(group != _NO_GROUP)
    kept = kept[np.argsort(group[kept], kind="stable")]
    starts = np.flatnonzero(np.diff(group[kept])) + 1
    parts = [part for part in np.split(kept, starts) if len(part)]
    values = np.array([_ndcg_of(score[part], relevance[part], k) for part in parts])
    return Mean.from_values(values, np.ones(len(values)))


def _ndcg_of(score: Floats, relevance: Floats, k: int | None) -> float:
    if np.isnan(score).any():
        return math.nan
    discount = 1 / np.log2(np.arange(2, len(score) + 2))
    discount[len(score) if k is None else k :] = 0.0
    best = float(np.sort(relevance)[::-1] @ discount)
    _, place, counts = np.unique(-score, return_inverse=True, return_counts=True)
    of_ties = np.diff(np.cumsum(discount)[np.cumsum(counts) - 1], prepend=0.0)
    return float(np.bincount(place, relevance) / counts @ of_ties) / best if best else 0.0
