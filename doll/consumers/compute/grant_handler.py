"""Algorithm 2 from grant to blob: weights, guarded gradient, sum or steps, compression. Runs where the model is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from doll.config import JobConfig
from doll.consumers.compute.batch_sets import SetContribution
from doll.consumers.compute.compressor import Compressor
from doll.consumers.compute.gradient_engine import GoesOn
from doll.consumers.compute.local_model import LocalModel
from doll.consumers.intake.dead_letters import DeadLetters, usable_samples, without_samples
from doll.consumers.protocol.worker_core import Batch, ComputedBatch, GradientDone
from doll.errors import BlobError
from doll.process.fault_points import fault_point
from doll.records.control import Grant
from doll.storage.blobs import Blobs, gradient_key
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.consumers.compute.guard import GuardedGradient
    from doll.consumers.tables.table_rows import TableRows
    from doll.optim.contribution import Contribution


log = get_logger(__name__)


class BatchComputer(Protocol):
    """Computes the gradient of a batch without the samples that must not be learned, or the step that a task makes."""

    def compute(self, x: npt.NDArray[Any], y: npt.NDArray[Any], *, batch: int) -> GuardedGradient:
        """Of samples `x` of shape (n, ...), `y` of shape (n, ...), of batch `batch` of the worker's stream."""
        ...


class GrantHandler:
    """Answers one worker's grants. Not thread-safe: one thread computes."""

    def __init__(
        self,
        config: JobConfig,
        *,
        local_model: LocalModel,
        guard: BatchComputer,
        compressor: Compressor,
        blobs: Blobs,
        dead_letters: DeadLetters,
        contribution: SetContribution,
        rows: TableRows | None = None,
        scope: str = "",
    ) -> None:
        """
        Args:
            scope: as in `doll.storage.blobs.scope_of`; default: the job, of a run without an id.
            rows: of the model's tables; None: it has none.
        """
        self._scope = scope or config.job
        self._ttl_s = config.blobs.ttl_s
        self._local_model = local_model
        self._guard = guard
        self._compressor = compressor
        self._blobs = blobs
        self._dead_letters = dead_letters
        self._contribution = contribution
        self._rows = rows
        self._limit_s = config.worker.set_limit_s
        self._batches_per_push = config.training.policy.batches_per_push
        self._last = (0, 0, 0)  # term, grant id and version of the batch that was computed last

    def handle(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        """Compute the gradients of `batches`, one after the other, and store their sum; None: the weights, or rows of
        tables, are not available.

        No batch is begun once the set has taken as long as a set may take (`WorkerConfig.set_limit_s`), or where
        `goes_on` says no; the first one always is. Where a push takes several batches and these are not yet all,
        nothing is stored.

        Raises:
            TaskError: the fault is the task's or the model's.
            ServiceUnavailableError: Kafka does not take a dead letter, or waiting for the blob store was given up.
        """
        started_s = time.perf_counter()
        version: int | None = None
        fetch_s = add_s = 0.0
        computed: list[ComputedBatch] = []
        if not self._contribution.begin(grant):
            log.warning("grant_void", batch=grant.first, reason="its step is in the model already")
            return None
        for batch, grant_id in zip(batches, grant.grant_ids, strict=True):
            if computed:
                fault_point("worker.mid_set")
                if time.perf_counter() - started_s >= self._limit_s or not goes_on(batch.number, grant_id):
                    break
                if self._batches_per_push > 1 and batch.number % self._batches_per_push == 0:
                    break  # it is of another push
            if batch.num_samples == 0:
                self._contribution.skip(batch.number)
                computed.append(without_samples(batch))
                continue
            begun_s = time.perf_counter()
            if version is None:
                version = self._local_model.load(grant)
                if version is None:
                    return None
                fetch_s = time.perf_counter() - begun_s
            else:
                self._contribution.keep()
                add_s += time.perf_counter() - begun_s
            try:
                if self._rows is not None:
                    self._rows.begin(grant, partial(goes_on, batch.number, grant_id))
                item = self._compute(batch, version)
            except BlobError as exc:
                log.warning("rows_missing", batch=batch.number, reason=str(exc))
                if not computed:
                    return None
                break
            if item is None:
                break
            computed.append(item)
        version = grant.version if version is None else version
        self._last = (grant.term, grant.grant_ids[0], version)
        done = GradientDone("", version, tuple(computed), fetch_s, add_s)
        if (batches[len(computed) - 1].number + 1) % self._batches_per_push:
            return replace(done, is_kept=True)
        if len(computed) > 1:
            fault_point("worker.after_sum")
        values = self._contribution.values()
        done = replace(done, holds=self._contribution.holds, holds_back=self._contribution.holds_back)
        return self._store(done, values, "")

    def store_rest(self, until: int) -> GradientDone:
        """Store what was computed and is not pushed; see `GradientEngine.store_rest`.

        Raises:
            ServiceUnavailableError: waiting for the blob store was given up.
        """
        values = self._contribution.rest(until)
        done = self._store(GradientDone("", self._last[2], (), holds=self._contribution.holds), values, ":rest")
        self._contribution.rest_stored()
        return done

    def _store(self, done: GradientDone, values: Contribution | None, suffix: str) -> GradientDone:
        if values is None:
            return done
        term, grant_id, version = self._last
        key = gradient_key(self._scope, term, grant_id) + suffix
        begun_s = time.perf_counter()
        parts = self._compressor.compress(values, version=version, rows=self._contribution.rows())
        self._blobs.put(key, parts, self._ttl_s)
        fault_point("worker.after_blob")
        return replace(done, key=key, store_s=done.store_s + time.perf_counter() - begun_s)

    def _compute(self, batch: Batch, version: int) -> ComputedBatch | None:
        """One batch of the set; None where the sum cannot hold it: it is the first of another set."""
        begun_s = time.perf_counter()
        gradient, bad = self._guard.compute(batch.data.x, batch.data.y, batch=batch.number)
        if gradient is None:
            self._contribution.skip(batch.number)
        elif not self._contribution.add(gradient, batch=batch.number, num_samples=len(batch.data.x) - len(bad)):
            return None
        left = self._dead_letters.refuse_samples(batch, bad) if bad else usable_samples(batch)
        compute_s = time.perf_counter() - begun_s
        loss_sum, metric_sums = (0.0, {}) if gradient is None else (gradient.loss_sum, gradient.metric_sums)
        return ComputedBatch(
            left.num_samples, loss_sum, metric_sums, left.dead, left.dead_samples, compute_s, version,
            left.dead_reasons,
        )  # fmt: skip
