"""The samples on which all workers of a job evaluate their own weights, so that the replicas can be compared."""

from __future__ import annotations

import math
from typing import Final

from doll.config import JobConfig
from doll.consumers.compute.gradient import GradientComputer
from doll.errors import BlobError, ServiceUnavailableError
from doll.model.random_numbers import seed_of
from doll.task.base import Task
from doll.task.batches import SampleBatch, batch_of
from doll.telemetry import get_logger

log = get_logger(__name__)

_EVERY_VERSIONS: Final = 4
_OF_A_BATCH: Final = 4  # a quarter of a batch's samples at every fourth version costs 2 % of a worker's computation


class SharedSamples:
    """The held-out samples, of which each version has its part, the same at all workers. Not thread-safe."""

    def __init__(self, config: JobConfig, task: Task, computer: GradientComputer) -> None:
        self._config = config
        self._task = task
        self._computer = computer
        self._size = max(1, config.data.batch_size // _OF_A_BATCH)
        self._samples: SampleBatch | None = None  # read when they are used first
        self._is_off = False

    def loss(self, version: int) -> float | None:
        """Return the mean loss of the replica on the samples of `version`; None if there are none, or no finite loss.
        Raise ServiceUnavailableError if the wait for the blob store was given up."""
        if self._is_off or version % _EVERY_VERSIONS:
            return None
        try:
            if self._samples is None:
                self._samples = batch_of(self._task, self._task.holdout(), self._config.evaluation.max_samples)
            if not (num_parts := math.ceil(self._samples.num_samples / self._size)):
                raise ValueError("the task has no held-out samples")
            part = version // _EVERY_VERSIONS % num_parts
            self._computer.seed = seed_of(self._config.seed, version)
            loss = self._computer.loss(*self._samples.take(slice(part * self._size, (part + 1) * self._size)))
        except ServiceUnavailableError:
            raise
        except BlobError:  # rows of tables
            return None
        except Exception as exc:  # the user's code may raise anything
            self._is_off = True
            log.warning("replica_not_evaluated", error=f"{type(exc).__name__}: {exc}"[:500])
            return None
        return loss if math.isfinite(loss) else None
