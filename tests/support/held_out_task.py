"""The synthetic task with held-out samples, for jobs whose processes evaluate their weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from doll import Sample
from examples.synthetic.task import Gaussian


class HeldOut(Gaussian):
    def holdout(self) -> Iterable[Sample]:
        rng = np.random.default_rng(0)
        features = rng.normal(size=(64, self._features)).astype(np.float32)
        return [Sample(row, np.int64(at % self.num_classes)) for at, row in enumerate(features)]
