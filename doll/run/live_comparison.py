"""`doll versions compare`: two versions, of one job or of two, measured on the records that come now."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from doll.config.gates import direction_of
from doll.consumers.intake.decoding import RawRecords
from doll.errors import ConfigError
from doll.evaluation.heldout import block_means
from doll.evaluation.live_records import LiveRecords, samples_of
from doll.evaluation.stored_weights import newest_weights
from doll.model.flat_model import build
from doll.run.status import reachable_kafka
from doll.run.target import Target
from doll.storage.checkpoints import resolve_version
from doll.storage.stores import open_store
from doll.task.base import load_task
from doll.task.batches import SampleBatch
from doll.theory.sequences import MeanSequence

Say = Callable[[str], None]

FIRST_BLOCKS: Final = 40  # before the first interval: the means of the blocks are nearly normal
MAX_RECORDS_PER_LOOK: Final = 2_000
_LOOK_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class LiveDifference:
    """The difference of a metric between two models on the same records, model `a` minus model `b`.

    Attributes:
        low, high: bounds of its mean, which hold at all looks at once with probability 1 - `error`.
        records: number of records that both have computed, and neither has learned.
    """

    a: str
    b: str
    metric: str
    mean_a: float
    mean_b: float
    low: float
    high: float
    records: int
    error: float

    @property
    def is_decided(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def better(self) -> str:
        """The better model; "": not decided, or the metric has no known direction."""
        direction = direction_of(self.metric)
        if not self.is_decided or direction not in ("lower", "higher"):
            return ""
        return self.a if (self.high < 0) == (direction == "lower") else self.b

    def text(self) -> str:
        values = f"{self.metric} of {self.a}: {self.mean_a:.4g}, of {self.b}: {self.mean_b:.4g}"
        level = f"{100 * (1 - self.error):g} %"
        if not math.isfinite(self.low):
            return f"{values}; {self.records:,} records, too few for an interval"
        between = f"difference {self.low:+.3g} to {self.high:+.3g} ({level} at all times), {self.records:,} records"
        decided = f"{self.better} is better" if self.better else "they differ" if self.is_decided else "not decided yet"
        return f"{values}; {between}: {decided}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_decided": self.is_decided, "better": self.better}


class _Model:
    """One version of a job, with its task."""

    def __init__(self, target: Target, wanted: str, *, with_job: bool) -> None:
        self._config, store = target.config, open_store(target.config, target.run.path)
        version = resolve_version(store, wanted)
        self._task = load_task(self._config)
        self._model = build(self._config, self._task)
        stored = newest_weights(
            self._config, target.run.path, self._model, version=version,
            average=self._config.training.evaluates_average, in_place=True,
        )  # fmt: skip
        assert stored is not None, "the version was resolved"
        self._weights = stored
        self.name = f"{self._config.job} {version}" if with_job else f"version {version}"

    def samples(self, records: RawRecords) -> SampleBatch:
        return samples_of(self._config, self._task, records)

    def means(self, samples: SampleBatch, metric: str) -> list[float]:
        return block_means(self._task, self._model, self._weights, samples, metric)


class LiveComparison:
    """Compares two models, records by records. Not thread-safe."""

    def __init__(self, a: _Model, b: _Model, metric: str, error: float) -> None:
        self._a, self._b, self._metric, self._error = a, b, metric, error
        self._sequence = MeanSequence(FIRST_BLOCKS, error)
        self._sums = np.zeros(2)
        self._records = 0

    def add(self, records: RawRecords) -> None:
        """Compute these records with both models.

        Raises:
            ConfigError: the tasks decode different numbers of samples, have no such metric, or fail.
        """
        samples = self._a.samples(records), self._b.samples(records)
        count = samples[0].num_samples
        if count != samples[1].num_samples:
            raise ConfigError(
                f"{self._a.name} decodes {count} samples, {self._b.name} {samples[1].num_samples}: expected tasks that "
                "accept the same records"
            )
        if not count:
            return
        values = np.array([self._a.means(samples[0], self._metric), self._b.means(samples[1], self._metric)])
        if np.isnan(values).any():
            raise ConfigError(
                f"metric {self._metric}: expected loss or a mean that Task.metrics returns, a number for both models"
            )
        self._sequence.add(values[0] - values[1])
        self._sums += values.sum(axis=1)
        self._records += len(records.offsets)

    def difference(self) -> LiveDifference:
        low, high = self._sequence.interval()
        mean_a, mean_b = (self._sums / max(1, self._sequence.count)).tolist()
        return LiveDifference(
            a=self._a.name, b=self._b.name, metric=self._metric, mean_a=mean_a, mean_b=mean_b, low=low, high=high,
            records=self._records, error=self._error,
        )  # fmt: skip


def compare_live(
    target: Target, a: str, b: str, *, against: Target | None = None, metric: str = "loss", error: float = 0.05,
    seconds: float | None = None, say: Say = lambda text: None,
) -> LiveDifference:  # fmt: skip
    """Compare version `a` of a job with its version `b`, or with version `b` of the job `against`, on the records that
    come to the first job's samples topic from now on.

    Args:
        seconds: time limit; None: until the difference is decided.

    Raises:
        VersionUnknownError: a version is not kept.
        ConfigError: see `LiveComparison.add`.
        ServiceUnavailableError: Kafka does not answer.
    """
    torch.set_num_threads(1)
    target, services = reachable_kafka(target)
    with_job = against is not None
    first = _Model(target, a, with_job=with_job)
    compared = LiveComparison(first, _Model(against or target, b, with_job=with_job), metric, error)
    with closing(LiveRecords(target.config, services)) as records:
        records.begin()
        ends_s = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            time.sleep(max(0.0, min(_LOOK_S, ends_s - time.monotonic())))
            compared.add(records.take_raw(MAX_RECORDS_PER_LOOK))
            difference = compared.difference()
            say(difference.text())
            if difference.is_decided or time.monotonic() >= ends_s:
                return difference
