"""Algorithm 2 from grant to blob: weights, guarded gradient, compression, blob store. Runs where the model is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from doll.config import JobConfig
from doll.consumers.compressor import Compressor
from doll.consumers.dead_letters import DeadLetters, UsableSamples
from doll.consumers.gradient_engine import GoesOn
from doll.consumers.local_model import LocalModel
from doll.consumers.worker import Batch, ComputedBatch, GradientDone
from doll.process.fault_points import fault_point
from doll.records import Grant
from doll.storage.blobs import Blobs, gradient_key

if TYPE_CHECKING:
    from doll.consumers.gradient import GradientSum
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
        gradient_sum: GradientSum,
    ) -> None:
        self._job = config.job
        self._ttl_s = config.blobs.ttl_s
        self._local_model = local_model
        self._guard = guard
        self._compressor = compressor
        self._blobs = blobs
        self._dead_letters = dead_letters
        self._sum = gradient_sum
        self._limit_s = config.worker.set_limit_s

    def handle(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        """Compute the gradients of `batches`, one after the other, and store their sum; None: the weights are gone.

        No batch is begun once the set has taken as long as a set may take (`WorkerConfig.set_limit_s`), or where
        `goes_on` says no; the first one always is.

        Raises:
            TaskError: the fault is the task's or the model's.
            ServiceUnavailableError: Kafka does not take a dead letter, or waiting for the blob store was given up.
        """
        started_s = time.perf_counter()
        version: int | None = None
        fetch_s = add_s = 0.0
        computed: list[ComputedBatch] = []
        self._sum.clear()
        for batch, grant_id in zip(batches, grant.grant_ids, strict=True):
            if computed:
                fault_point("worker.mid_set")
                if time.perf_counter() - started_s >= self._limit_s or not goes_on(batch.number, grant_id):
                    break
            if batch.num_samples == 0:
                computed.append(ComputedBatch(0, dead=batch.dead, dead_samples=batch.dead_samples))
                continue
            begun_s = time.perf_counter()
            if version is None:
                version = self._local_model.load(grant)
                if version is None:
                    return None
                fetch_s = time.perf_counter() - begun_s
            else:
                self._sum.keep()
                add_s += time.perf_counter() - begun_s
            item = self._compute(batch)
            if item is None:
                break
            computed.append(item)
        values = self._sum.values()
        if values is None:
            return GradientDone("", grant.version if version is None else version, tuple(computed), fetch_s, add_s)
        if len(computed) > 1:
            fault_point("worker.after_sum")
        assert version is not None, "there is a gradient"
        key = gradient_key(self._job, grant.term, grant.grant_ids[0])
        begun_s = time.perf_counter()
        self._blobs.put(key, self._compressor.compress(values, version=version), self._ttl_s)
        add_s += time.perf_counter() - begun_s
        fault_point("worker.after_blob")
        return GradientDone(key, version, tuple(computed), fetch_s, add_s)

    def _compute(self, batch: Batch) -> ComputedBatch | None:
        """One batch of the set; None where the sum cannot hold it: it is the first of another set."""
        begun_s = time.perf_counter()
        gradient, bad = self._guard.compute(batch.data.x, batch.data.y)
        if gradient is not None and not self._sum.add(gradient):
            return None
        num_samples, dead, dead_samples = (
            self._dead_letters.refuse_samples(batch, bad)
            if bad
            else UsableSamples(batch.num_samples, batch.dead, batch.dead_samples)
        )
        compute_s = time.perf_counter() - begun_s
        if gradient is None:
            return ComputedBatch(num_samples, 0.0, {}, dead, dead_samples, compute_s)
        return ComputedBatch(num_samples, gradient.loss_sum, gradient.metric_sums, dead, dead_samples, compute_s)
