"""A task whose metrics are states, which keeps what it has scored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from doll import Sample, metrics
from examples.synthetic.task import Gaussian

SCORED: list[tuple[list[float], list[int]]] = []


class Scored(Gaussian):
    """Gaussian classes, with the metrics of a ranking."""

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, Any]:
        p = output.softmax(1)[:, 1]
        SCORED.append((p.double().tolist(), target.tolist()))
        right = (output.argmax(1) == target).double()
        return {
            "auc": metrics.auc(p, target), "ne": metrics.normalized_entropy(p, target),
            "accuracy": metrics.accuracy(output, target), "hits": right,
        }  # fmt: skip

    def holdout(self) -> Iterable[Sample]:
        rng = np.random.default_rng(5)
        return (Sample(rng.normal(size=6), at % 2) for at in range(1_100))
