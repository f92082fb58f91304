"""The engine that computes a worker's gradients outside its event loop, and the steps of Algorithm 2 from grant to
blob.

The engine is one thread of the worker's process, or a pipeline of stages (`doll.consumers.pipeline.pipeline_engine`),
which computes several grants at the same time. In the thread, `GrantHandler` does the steps of a grant: it loads
weights, computes the guarded gradient, adds the gradient or makes a step, and compresses the result.
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
from doll.model.slices import Slices
from doll.optim.optimizer import Contribution
from doll.process.fault_points import fault_point
from doll.records.control import Grant, HeldOutScore, NewVersion
from doll.storage.blobs import Blobs, gradient_key
from doll.storage.contributions import Compressor
from doll.storage.slice_blobs import put_slices
from doll.tables.rows import Rows
from doll.task.batches import SampleBatch
from doll.task.trees import Array, Tree
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.consumers.compute.gradient import Gradient, LocalModel
    from doll.consumers.compute.guard import GuardedGradient
    from doll.consumers.compute.shared_samples import SharedSamples
    from doll.consumers.tables.table_rows import WorkerTables

log = get_logger(__name__)

# (batch, grant id) -> whether a set may continue with this batch. Called between two batches, in the engine's thread.
GoesOn: TypeAlias = Callable[[int, int], bool]
# (samples that are not learned, seed) -> their score by the weights in the replica; None: they cannot be scored.
Scorer: TypeAlias = Callable[[SampleBatch, int], HeldOutScore | None]
Handle: TypeAlias = Callable[[Grant, Sequence[Batch], GoesOn], GradientDone | None]


class GradientEngine(Protocol):
    """An engine that computes gradients in the order of submission. One thread calls it; another sets the futures.

    Attributes:
        depth: maximum number of simultaneous grants. If it is above 1, each call of `submit` has one batch.
    """

    ended: Future[None]  # fails when the engine cannot continue, even if nothing is submitted

    @property
    def depth(self) -> int: ...

    def submit(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> Future[GradientDone | None]:
        """Compute and store the sum of the gradients of `batches`, with weights that `grant` allows. The result is None
        if these weights are not available any more.

        The set may end early, after at least one batch, if `goes_on` returns False or if the set has reached its time
        limit. The caller then submits the remaining batches. Futures are done in the order of submission. They fail
        with TaskError (the task's fault), ServiceUnavailableError, or another error.
        """

    def offer(self, weights: NewVersion) -> None:
        """Record newer weights. Batches submitted from now on use these or later weights, if their grants allow
        this."""

    def store_rest(self, until: int) -> Future[GradientDone]:
        """Store contributions that were computed but not pushed. These are contributions that are kept for a later
        push, or the held-back part of the steps of batches below `until`. The future fails with the same errors as that
        of `submit`."""

    def stop(self) -> None:
        """Begin no further batch, because the worker leaves. The answer to submitted batches that have not begun is a
        `GradientDone` without batches."""

    def close(self) -> None:
        """Wait for the batches that are being computed, and drop the other batches."""


class ThreadGradientEngine:
    """A `GradientEngine` with one thread, so that torch computes only one thing at a time. The thread only computes."""

    depth = 1

    def __init__(
        self,
        handle: Handle,
        offer: Callable[[NewVersion], object] = lambda weights: None,
        store_rest: Callable[[int], GradientDone] = lambda until: GradientDone("", 0, ()),
        background: Executor | None = None,
    ) -> None:
        """Start the thread. `offer`: see `GradientEngine.offer`; this function is called in the caller's thread.
        `background` is the executor that reads weights during the computation. This engine shuts the executor down."""
        self._background = background
        self._handle = handle
        self._offer = offer
        self._store_rest = store_rest
        self.ended: Future[None] = Future()  # never set
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

    The object stores which batches it has added, and for which grants, because a push names exactly these batches and
    grants (docs/decisions/0042). Not thread-safe.

    Attributes:
        holds_back: whether `values` returned only a part of the sum; `rest` returns the remaining part.
        holds: (batch, grant id) of each batch in the last result of `values` or `rest`, in the order of addition.
        absent: parameters without a gradient in this result, see `FlatModel.absent`.
    """

    @property
    def absent(self) -> int: ...

    @property
    def holds_back(self) -> bool: ...

    @property
    def holds(self) -> tuple[tuple[int, int], ...]: ...

    def begin(self, grant: Grant) -> bool:
        """Begin the batches of `grant`. Drop contributions of its first batch and of later batches, and contributions
        for another server. Return False if the first batch is already in the model; then no batch may be added."""

    def add(self, gradient: Gradient, *, batch: int) -> bool:
        """Add the gradient of batch `batch` over its usable samples. The memory of the gradient must not change until
        `keep`. Return False if the set cannot include the batch, which then begins another set. Raise IllegalEventError
        if a later batch was added before."""

    def skip(self, batch: int) -> None:
        """Add a batch without usable samples: the push names the batch, but the batch contributes nothing."""

    def keep(self) -> None:
        """Copy the gradient of the last `add` if needed, so that its memory may change."""

    def values(self) -> Contribution | None:
        """Return the dense part of the push, float32, shape (numel,), as in `doll.model.flat_model`; None if the push
        has no dense part.

        The result may be this object's memory, valid until the next `add`.
        """

    def rows(self) -> Mapping[str, Rows]:
        """Return the rows of tables to push, by name. Call this method once, after `values`."""

    def rest(self, until: int) -> Contribution | None:
        """Return the contributions that were added but not pushed; None if there are none. If a part is held back,
        return only the part of batches below `until`. Raise IllegalEventError if this part cannot be separated from the
        held-back part of later batches."""

    def rest_stored(self) -> None:
        """Record that the result of `rest` is stored. Before this call, `rest` returns the same result again."""


class BatchComputer(Protocol):
    """A component that computes the gradient of a batch, or the step that a task makes. It leaves out samples that must
    not be learned.

    Attributes:
        usual: usual measures of the batches so far, which the next process of the worker gets. (): unknown.
    """

    @property
    def usual(self) -> tuple[float, ...]: ...

    def compute(
        self, x: Tree, y: Tree, weight: Array | None, group: Array | None, *, seed: int
    ) -> GuardedGradient:  # fmt: skip
        """Return the gradient or the step. Arguments: see `SampleBatch`. `seed`: see `doll.model.random_numbers`."""


def batch_seed(seed: int, batch: Batch) -> int:
    """Return the seed of a batch that has samples, the same in each process. `seed`: the job's seed."""
    return seed_of(seed, batch.partition, int(batch.data.offsets[0]))


class GrantHandler:
    """The handler of one worker's grants. Not thread-safe: one thread computes."""

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
        shared: SharedSamples | None = None,
        held_out: Scorer | None = None,
        scope: str = "",
        slices: Slices | None = None,
    ) -> None:
        """Create the handler. `shared`: None: the replica is not evaluated. `held_out`: scores samples that are not
        learned; None: they have no score. `scope`: as in `doll.storage.blobs.scope_of`; default: the job's name, for a
        run without id. `slices`: those of the model's shards; None: it is not divided."""
        self._scope = scope or config.job
        self._seed = config.seed
        self._ttl_s = config.blobs.ttl_s
        self._local_model = local_model
        self._guard = guard
        self._compressor = compressor
        self._slices = slices
        self._blobs = blobs
        self._dead_letters = dead_letters
        self._contribution = contribution
        self._rows = rows
        self._shared = shared
        self._held_out = held_out
        self._limit_s = config.worker.set_limit_s
        self._batches_per_push = config.training.policy.batches_per_push
        self._last = (0, 0, 0)  # term, grant id and version of the last computed batch

    def offer(self, weights: NewVersion) -> None:
        """See `GradientEngine.offer`. Any thread may call this method."""
        if self._rows is not None:
            self._rows.offer(weights)
        self._local_model.offer(weights)

    def handle(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        """Compute the gradients of `batches` in order, and store their sum. Return None if the weights or rows of
        tables are not available.

        After the first batch, no further batch is begun if the set has reached its time limit
        (`WorkerConfig.set_limit_s`), or if `goes_on` returns False. If a push needs several batches and some of them
        are not computed yet, nothing is stored.

        Raises:
            TaskError: the fault is the task's or the model's.
            ServiceUnavailableError: Kafka does not accept a dead letter, or the worker has stopped waiting for the blob
                store.
        """
        started_s = time.perf_counter()
        version: int | None = None
        fetch_s, add_s, delta_bytes = 0.0, 0.0, 0
        computed: list[ComputedBatch] = []
        self._blobs.settle()  # the last push may still use memory that changes now
        if not self._contribution.begin(grant):
            log.warning("grant_void", batch=grant.first, reason="its step is in the model already")
            return None
        for batch, grant_id in zip(batches, grant.grant_ids, strict=True):
            if computed:
                fault_point("worker.mid_set")
                if time.perf_counter() - started_s >= self._limit_s or not goes_on(batch.number, grant_id):
                    break
                if self._batches_per_push > 1 and batch.number % self._batches_per_push == 0:
                    break  # the batch belongs to another push
            if batch.num_samples == 0 and not batch.held_out:
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
        """Store contributions that were computed but not pushed; see `GradientEngine.store_rest`."""
        self._blobs.settle()
        values = self._contribution.rest(until)
        holds = self._contribution.holds
        holds_back = bool(holds) and self._contribution.holds_back  # a rest, which names no batch, has all
        done = self._store(GradientDone("", self._last[2], (), holds=holds, holds_back=holds_back), values, ":rest")
        self._contribution.rest_stored()
        return done

    def _store(self, done: GradientDone, values: Contribution | None, suffix: str) -> GradientDone:
        if values is None:
            return done
        term, grant_id, version = self._last
        key = gradient_key(self._scope, term, grant_id) + suffix
        absent = self._contribution.absent
        begun_s = time.perf_counter()
        names = [key] if self._slices is None else self._slices.keys(key)
        blobs = self._compressor.compress_slices(values, self._slices, version=version, rows=self._contribution.rows())
        # If a rest were lost, the whole job would be rolled back.
        is_there = put_slices(self._blobs, names, blobs, self._ttl_s, soon=not suffix)
        fault_point("worker.after_blob")
        store_s = done.store_s + time.perf_counter() - begun_s
        return replace(
            done, key=key, store_s=store_s, is_on_its_way=not is_there,
            absent=absent.to_bytes((absent.bit_length() + 7) // 8, "little"),
        )  # fmt: skip

    def _compute(self, batch: Batch, version: int) -> ComputedBatch | None:
        """Compute one batch of the set. Return None if the sum cannot include the batch; it then begins another set."""
        shared_loss = None if self._shared is None else self._shared.loss(version)
        begun_s = time.perf_counter()
        score = self._score(batch) if batch.held_out else None
        gradient: Gradient | None = None
        bad: Mapping[int, str] = {}
        if batch.num_samples:
            gradient, bad = self._guard.compute(*batch.data.samples, seed=batch_seed(self._seed, batch))
        if gradient is None or not gradient.weight:
            self._contribution.skip(batch.number)
        elif not self._contribution.add(gradient, batch=batch.number):
            return None
        left = self._dead_letters.refuse_samples(batch, bad) if bad else usable_samples(batch)
        compute_s = time.perf_counter() - begun_s
        computed = replace(
            left, compute_s=compute_s, version=version, usual=self._guard.usual, shared_loss=shared_loss,
            held_out_score=score,
        )  # fmt: skip
        if gradient is None:
            return computed
        return replace(
            computed, loss_sum=gradient.loss_sum, metric_sums=gradient.metric_sums, weight=gradient.weight
        )  # fmt: skip

    def _score(self, batch: Batch) -> HeldOutScore | None:
        samples = batch.data.held_out_samples
        if samples is None or self._held_out is None:
            return None
        return self._held_out(samples, seed_of(self._seed, batch.partition, batch.held_out[0]))
