"""Made-up clicks of known probability: categories by Zipf's law, a sparse vector of true weights, Criteo's format.

The lowest log-loss that any predictor reaches on them is known: `bayes_log_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.producers.sources.criteo import CATEGORIES, COUNTS, NO_COUNT, RECORD
from doll.producers.sources.images import values_of

LOG_SCALE: Final = 0.25  # as the task's: counts of some thousands become numbers of about 2
_BLOCK: Final = 1024
_NO_COUNT_SHARE: Final = 0.2
_COUNT_WEIGHT: Final = 0.2  # standard deviation
_CATEGORY_WEIGHT: Final = 0.8  # standard deviation of the weights that are not 0
_BIAS: Final = -1.0
_LARGEST_LOG: Final = 20.0
_ODD: Final = np.uint32(0x9E3779B1)


@dataclass(frozen=True)
class Truth:
    """From what clicks are drawn; streams that share it learn the same concept.

    The logit of a click is the bias, plus the weights of its categories, plus the weight of each count c that is there
    times `LOG_SCALE` ln(1 + c): a model that the example `clicks` can learn, except for categories that share a
    column of its table.

    Attributes:
        bias: of the logit.
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
    """The truth of a job.

    Args:
        categories: values of each of the 26 categories.
        zipf: the value of rank r = 1, 2, ... has a probability proportional to r ** -zipf; 0: all the same.
        density: share of the weights of categories that are not 0.
    """
    weights = rng.normal(0.0, _CATEGORY_WEIGHT, (CATEGORIES, categories))
    weights[rng.random((CATEGORIES, categories)) >= density] = 0.0
    shares = np.arange(1, categories + 1, dtype=np.float64) ** -zipf
    cumulative = shares.cumsum() / shares.sum()
    count_weights = rng.normal(0.0, _COUNT_WEIGHT / LOG_SCALE, COUNTS)
    count_logs = rng.uniform(0.5, 5.0, COUNTS)
    # The mean of the logit does not depend on the draw of the counts' weights.
    bias = _BIAS - (1 - _NO_COUNT_SHARE) * LOG_SCALE * float(count_weights @ count_logs)
    return Truth(bias, weights.astype(np.float32), count_weights, count_logs, cumulative)


def draw(truth: Truth, count: int, rng: np.random.Generator) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """Clicks, of dtype `RECORD`, shape (count,), and the probability of each to be one, shape (count,)."""
    ranks = np.searchsorted(truth.cumulative, rng.random((count, CATEGORIES)), side="right")
    np.minimum(ranks, len(truth.cumulative) - 1, out=ranks)  # the last sum may be a little below 1
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
    """The 32-bit number of each category, shape (n, 26): different ranks of one column have different numbers."""
    # Multiplying by an odd number and adding are one-to-one modulo 2**32.
    columns = np.arange(1, CATEGORIES + 1, dtype=np.uint32) * np.uint32(0x85EBCA77)
    return (ranks.astype(np.uint32) + np.uint32(1)) * _ODD + columns


def bayes_log_loss(truth: Truth, rng: np.random.Generator, count: int = 200_000) -> float:
    """The expected log-loss of the true probabilities, in nats, estimated from `count` clicks."""
    total = 0.0
    for at in range(0, count, _BLOCK):
        p = draw(truth, min(_BLOCK, count - at), rng)[1]
        total -= float((p * np.log(p) + (1 - p) * np.log1p(-p)).sum())
    return total / count


def samples(truth: Truth, rng: np.random.Generator) -> Iterator[bytes]:
    """Packed records without end."""
    while True:
        yield from values_of(draw(truth, _BLOCK, rng)[0])
