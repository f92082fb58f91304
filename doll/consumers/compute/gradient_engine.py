"""The place where a worker's gradients are computed, away from its event loop, and Algorithm 2 from grant to blob.

That is one thread of the worker's process, or a pipeline of stages (`doll.consumers.pipeline.pipeline_engine`), which
takes several grants at once. `GrantHandler` does in that thread what a grant asks for: weights, guarded gradient, sum
or steps, compression.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from doll.config import JobConfig
from doll.consumers.intake.dead_letters import DeadLetters, usable_samples
from doll.consumers.protocol.worker_core import Batch, ComputedBatch, GradientDone
from doll.errors import BlobError
from doll.model.random_numbers import seed_of
from doll.optim.optimizer import Contribution
from doll.process.fault_points import fault_point
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import Blobs, gradient_key
from doll.storage.contributions import Compressor
from doll.tables.rows import Rows
from doll.task.trees import Array, Tree
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.consumers.compute.gradient import Gradient, LocalModel
    from doll.consumers.compute.guard import GuardedGradient
    from doll.consumers.tables.table_rows import WorkerTables

log = get_logger(__name__)

# (batch, grant id) -> whether a set may go on with this batch. Called between two batches, from the engine's thread.
GoesOn: TypeAlias = Callable[[int, int], bool]
Handle: TypeAlias = Callable[[Grant, Sequence[Batch], GoesOn], GradientDone | None]


class GradientEngine(Protocol):
    """Computes what it is given, in that order. Called from one thread; the futures are set by another.

    Attributes:
        depth: how many grants may be under way at once. An engine that takes several is given one batch at a time.
    """

    ended: Future[None]  # fails when the engine cannot go on, also while nothing is submitted

    @property
    def depth(self) -> int: ...

    def submit(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> Future[GradientDone | None]:
        """The sum of the gradients of `batches` at weights that `grant` allows, stored; None: these weights are gone.

        The set may end early, after its first batch or later: if `goes_on` says so, or if it has taken as long as a set
        may take. The caller submits the rest. Futures are done in the order of submission. They fail with TaskError
        (the task's fault), ServiceUnavailableError, or whatever else went wrong.
        """

    def offer(self, weights: NewVersion) -> None:
        """Note newer weights: what is submitted from now on uses these or later ones, if its grant allows that."""

    def store_rest(self, until: int) -> Future[GradientDone]:
        """Store what was computed and is not pushed: kept for a later push, or held back of the steps of batches below
        `until`. Fails as `submit`."""

    def stop(self) -> None:
        """Begin nothing more: the worker leaves. Batches that were submitted and not begun are answered with a
        `GradientDone` of no batches."""

    def close(self) -> None:
        """Wait for the batches under way, and drop the others."""


class ThreadGradientEngine:
    """`GradientEngine` of one thread, so torch never runs beside itself. It computes and does nothing else."""

    depth = 1

    def __init__(
        self,
        handle: Handle,
        offer: Callable[[NewVersion], object] = lambda weights: None,
        store_rest: Callable[[int], GradientDone] = lambda until: GradientDone("", 0, ()),
        background: Executor | None = None,
    ) -> None:
        """`offer`: see `GradientEngine.offer`; called from the caller's thread. `background`: what reads weights beside
        the computation; it is shut down with this engine."""
        self._background = background
        self._handle = handle
        self._offer = offer
        self._store_rest = store_rest
        self.ended: Future[None] = Future()  # it never is
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    def submit(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> Future[GradientDone | None]:
        return self._executor.submit(self._handle, grant, batches, goes_on)

    def offer(self, weights: NewVersion) -> None:
        self._offer(weights)

    def store_rest(self, until: int) -> Future[GradientDone]:
        return self._executor.submit(self._store_rest, until)

    def stop(self) -> None:
        pass  # `goes_on` ends a set

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)


class SetContribution(Protocol):
    """The contribution of a set of batches to an update: the sum of their gradients, or of the worker's own steps.

    It knows which batches it has added, for which grants: a push names these and no others (docs/decisions/0042). Not
    thread-safe.

    Attributes:
        holds_back: `values` did not return the whole of what was added; `rest` has it.
        holds: (batch, grant id) of what `values` or `rest` returned last, in the order of addition.
        absent: parameters without a gradient in all of that, see `FlatModel.absent`.
    """

    @property
    def absent(self) -> int: ...

    @property
    def holds_back(self) -> bool: ...

    @property
    def holds(self) -> tuple[tuple[int, int], ...]: ...

    def begin(self, grant: Grant) -> bool:
        """The batches of `grant` are computed next. What was added of its first batch or of later ones does not count
        any more, nor what was added for another server. False if its first batch is in the model already: nothing may
        be added."""

    def add(self, gradient: Gradient, *, batch: int) -> bool:
        """Take the gradient of batch `batch`, over its usable samples; its memory must not change until `keep`. False
        if the set cannot hold it as well: it is the first of another one. Raises IllegalEventError if a later batch was
        added before."""

    def skip(self, batch: int) -> None:
        """Add a batch without a usable sample: it belongs to what is pushed, and adds nothing to it."""

    def keep(self) -> None:
        """The memory of the gradient that `add` has taken may change from now on."""

    def values(self) -> Contribution | None:
        """The dense part of the push, float32, shape (numel,), as in `doll.model.flat_model`; None without any.

        It may be this object's memory, until the next `add`.
        """

    def rows(self) -> Mapping[str, Rows]:
        """The rows of tables to push, by name. Called once, after `values`."""

    def rest(self, until: int) -> Contribution | None:
        """The part that was added and not pushed, of batches below `until` if something is held back; None: nothing.
        Raises IllegalEventError if what is held back of these cannot be told from what is held back of later ones."""

    def rest_stored(self) -> None:
        """Note that `rest`'s result is stored, and held back no longer. Until then `rest` returns it again."""


class BatchComputer(Protocol):
    """Computes the gradient of a batch without the samples that must not be learned, or the step that a task makes.

    Attributes:
        usual: what is usual of the batches so far, for the next process that begins; () if nothing is.
    """

    @property
    def usual(self) -> tuple[float, ...]: ...

    def compute(
        self, x: Tree, y: Tree, weight: Array | None, group: Array | None, *, seed: int
    ) -> GuardedGradient:  # fmt: skip
        """The counts of samples, as in `doll.task.batches.SampleBatch`. `seed`: see `doll.model.random_numbers`."""


def batch_seed(seed: int, batch: Batch) -> int:
    """The seed of a batch that has samples, for whoever computes it; `seed`: of the job."""
    return seed_of(seed, batch.partition, int(batch.data.offsets[0]))


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
        rows: WorkerTables | None = None,
        scope: str = "",
    ) -> None:
        """`scope`: as in `doll.storage.blobs.scope_of`; default: the job, of a run without an id."""
        self._scope = scope or config.job
        self._seed = config.seed
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

    def offer(self, weights: NewVersion) -> None:
        """See `GradientEngine.offer`. May be called from any thread."""
        if self._rows is not None:
            self._rows.offer(weights)
        self._local_model.offer(weights)

    def handle(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        """Compute the gradients of `batches`, one after the other, and store their sum; None: the weights, or rows of
        tables, are not available.

        No batch is begun once the set has taken as long as a set may take (`WorkerConfig.set_limit_s`), or if
        `goes_on` says no; the first one always is. If a push takes several batches and these are not yet all,
        nothing is stored.

        Raises:
            TaskError: the fault is the task's or the model's.
            ServiceUnavailableError: Kafka does not take a dead letter, or waiting for the blob store was given up.
        """
        started_s = time.perf_counter()
        version: int | None = None
        fetch_s, add_s, delta_bytes = 0.0, 0.0, 0
        computed: list[ComputedBatch] = []
        self._blobs.settle()  # what was pushed last may be memory that changes now
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
                computed.append(usable_samples(batch))
                continue
            begun_s = time.perf_counter()
            if version is None:
                version = self._local_model.load(grant)
                if version is None:
                    return None
                delta_bytes = self._local_model.delta_bytes
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
        done = GradientDone("", version, tuple(computed), fetch_s, add_s, delta_bytes=delta_bytes)
        if (batches[len(computed) - 1].number + 1) % self._batches_per_push:
            return replace(done, is_kept=True)
        if len(computed) > 1:
            fault_point("worker.after_sum")
        values = self._contribution.values()
        done = replace(done, holds=self._contribution.holds, holds_back=self._contribution.holds_back)
        return self._store(done, values, "")

    def store_rest(self, until: int) -> GradientDone:
        """Store what was computed and is not pushed; see `GradientEngine.store_rest`."""
        self._blobs.settle()
        values = self._contribution.rest(until)
        done = self._store(GradientDone("", self._last[2], (), holds=self._contribution.holds), values, ":rest")
        self._contribution.rest_stored()
        return done

    def _store(self, done: GradientDone, values: Contribution | None, suffix: str) -> GradientDone:
        if values is None:
            return done
        term, grant_id, version = self._last
        key = gradient_key(self._scope, term, grant_id) + suffix
        absent = self._contribution.absent
        begun_s = time.perf_counter()
        parts = self._compressor.compress(values, version=version, rows=self._contribution.rows())
        is_there = True
        if suffix:  # of a rest that does not come the whole job would be rolled back
            self._blobs.put(key, parts, self._ttl_s)
        else:
            is_there = self._blobs.put_soon(key, parts, self._ttl_s)
        fault_point("worker.after_blob")
        store_s = done.store_s + time.perf_counter() - begun_s
        return replace(
            done, key=key, store_s=store_s, is_on_its_way=not is_there,
            absent=absent.to_bytes((absent.bit_length() + 7) // 8, "little"),
        )  # fmt: skip

    def _compute(self, batch: Batch, version: int) -> ComputedBatch | None:
        """Compute one batch of the set; None if the sum cannot hold it: it is the first of another set."""
        begun_s = time.perf_counter()
        gradient, bad = self._guard.compute(*batch.data.samples, seed=batch_seed(self._seed, batch))
        if gradient is None or not gradient.weight:
            self._contribution.skip(batch.number)
        elif not self._contribution.add(gradient, batch=batch.number):
            return None
        left = self._dead_letters.refuse_samples(batch, bad) if bad else usable_samples(batch)
        compute_s = time.perf_counter() - begun_s
        computed = replace(left, compute_s=compute_s, version=version, usual=self._guard.usual)
        if gradient is None:
            return computed
        return replace(
            computed, loss_sum=gradient.loss_sum, metric_sums=gradient.metric_sums, weight=gradient.weight
        )  # fmt: skip
