"""The synthetic task with held-out samples, which the example's class lacks: the evaluator has work to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from doll.producers.sources import CONCEPT, child_rng
from doll.task.base import Sample
from examples.synthetic.source import class_planes, samples
from examples.synthetic.task import Gaussian


class HeldOutGaussian(Gaussian):
    """The concept of a synthetic source without drift and with the job's default seed."""

    def holdout(self) -> Iterable[Sample]:
        """1,000 samples of their own."""
        planes = class_planes(self._features, self.num_classes, child_rng(0, CONCEPT))
        return [
            self.decode(record) for record in itertools.islice(samples(planes, 0.0, np.random.default_rng(47)), 1000)
        ]
