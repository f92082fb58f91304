"""Sparse logistic regression on drawn clicks, in numpy: the other problem of MLLess's figures. Pure.

A sample is like one of Criteo's: a few numbers, and categories whose values are hashed to columns. Values are drawn by
Zipf's law, so most columns are rare.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.paper.function_job import Step, Vector

Ints = npt.NDArray[np.int64]


class Clicks:
    """`benchmarks.paper.function_job.Problem` of binary cross-entropy.

    The parameters are the weights of the numbers, then those of the hashed columns; all begin at 0.

    Args:
        batch: samples of one batch.
        rate: a step is -rate times the sum of the batch's gradients, over `step_samples`.
        step_samples: what the sum is divided by, whatever the batch: the samples of all workers.
    """

    NUMBERS, CATEGORIES = 13, 26

    def __init__(
        self, *, columns: int, samples: int, batch: int, step_samples: int, rate: float, skew: float = 1.1, seed: int
    ) -> None:
        rng = np.random.default_rng((seed, 3))
        self._batch, self._rate, self._step_samples, self._seed = batch, rate, step_samples, seed
        self.num_parameters = self.NUMBERS + columns
        # Each category has its values at its own columns, the popular ones first.
        size = columns // self.CATEGORIES
        popularity = 1.0 / np.arange(1, size + 1) ** skew
        values = rng.choice(size, (samples, self.CATEGORIES), p=popularity / popularity.sum())
        self._columns: Ints = self.NUMBERS + values + size * np.arange(self.CATEGORIES)
        self._numbers = rng.normal(0.0, 1.0, (samples, self.NUMBERS)).astype(np.float32)
        truth = rng.normal(0.0, 0.4, self.num_parameters).astype(np.float32)
        self._clicked = (rng.random(samples) < _sigmoid(self._scores(truth, slice(None)) - 1.0)).astype(np.float32)

    def start(self) -> Vector:
        return np.zeros(self.num_parameters, np.float32)

    def step(self, parameters: Vector, worker: int, batch: int) -> Step:
        rng = np.random.default_rng((self._seed, 4, worker, batch))
        picked = rng.integers(0, len(self._clicked), self._batch)
        scores = self._scores(parameters, picked)
        error = (_sigmoid(scores) - self._clicked[picked]) * np.float32(self._rate / self._step_samples)
        step = np.empty_like(parameters)
        step[: self.NUMBERS] = -error @ self._numbers[picked]
        columns = (self._columns[picked] - self.NUMBERS).ravel()
        errors = np.repeat(error, self.CATEGORIES)
        step[self.NUMBERS :] = -np.bincount(columns, errors, self.num_parameters - self.NUMBERS)
        return Step(step, float(_entropy(scores, self._clicked[picked]).sum()), self._batch)

    def loss(self, parameters: Vector) -> float:
        return float(_entropy(self._scores(parameters, slice(None)), self._clicked).mean())

    def _scores(self, parameters: Vector, picked: Ints | slice) -> Vector:
        scores = self._numbers[picked] @ parameters[: self.NUMBERS] + parameters[self._columns[picked]].sum(1)
        result: Vector = scores.astype(np.float32, copy=False)
        return result


def _sigmoid(scores: Vector) -> Vector:
    return (1.0 / (1.0 + np.exp(-scores))).astype(np.float32)


def _entropy(scores: Vector, clicked: Vector) -> Vector:
    result: Vector = (np.logaddexp(0.0, scores) - clicked * scores).astype(np.float32)
    return result
