"""Algorithm 2 from grant to blob: weights, guarded gradient, compression, blob store. Runs where the model is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from doll.config import JobConfig
from doll.consumers.compressor import Compressor
from doll.consumers.dead_letters import DeadLetters, UsableSamples
from doll.consumers.local_model import LocalModel
from doll.consumers.worker import Batch, GradientDone
from doll.process.fault_points import fault_point
from doll.records import Grant
from doll.storage.blobs import Blobs, gradient_key

if TYPE_CHECKING:
    from doll.consumers.guard import Guard


class GrantHandler:
    """Answers one worker's grants. Not thread-safe: one thread computes."""

    def __init__(
        self,
        config: JobConfig,
        *,
        local_model: LocalModel,
        guard: Guard,
        compressor: Compressor,
        blobs: Blobs,
        dead_letters: DeadLetters,
    ) -> None:
        self._job = config.job
        self._ttl_s = config.blobs.ttl_s
        self._local_model = local_model
        self._guard = guard
        self._compressor = compressor
        self._blobs = blobs
        self._dead_letters = dead_letters

    def handle(self, grant: Grant, batch: Batch) -> GradientDone | None:
        """Compute and store the gradient of `batch`; None: the weights are not in the blob store.

        Raises:
            TaskError: the fault is the task's or the model's.
            ServiceUnavailableError: Kafka does not take a dead letter, or waiting for the blob store was given up.
        """
        if batch.num_samples == 0:
            return GradientDone("", grant.version, 0.0, {}, 0.0, 0.0, 0.0, 0, batch.dead, batch.dead_samples)
        started_s = time.perf_counter()
        version = self._local_model.load(grant)
        if version is None:
            return None
        fetched_s = time.perf_counter()
        gradient, bad = self._guard.compute(batch.data.x, batch.data.y)
        usable = (
            self._dead_letters.refuse_samples(batch, bad)
            if bad
            else UsableSamples(batch.num_samples, batch.dead, batch.dead_samples)
        )
        computed_s = time.perf_counter()
        if gradient is None:
            return GradientDone("", version, 0.0, {}, computed_s - fetched_s, fetched_s - started_s, 0.0, *usable)
        key = gradient_key(self._job, grant.term, grant.grant_id)
        self._blobs.put(key, self._compressor.compress(gradient.values, version=version), self._ttl_s)
        stored_s = time.perf_counter()
        fault_point("worker.after_blob")
        return GradientDone(
            key, version, gradient.loss_sum, gradient.metric_sums, computed_s - fetched_s, fetched_s - started_s,
            stored_s - computed_s, *usable,
        )  # fmt: skip
