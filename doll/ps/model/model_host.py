"""The host of the model at the parameter server. It collects gradients, makes versions and publishes weights.

One host has all weights, and all rows of all tables. If the model has shards (`ps.shards`), each of them has a host for
its slice (`doll.ps.shards`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.errors import BlobError, NotFiniteError
from doll.optim.optimizer import Updater, diverged
from doll.process.fault_points import fault_point
from doll.process.threads import in_thread
from doll.ps.engine.events import ApplyUpdate, FetchGradient, GradientFetched, GradientLost
from doll.ps.model.row_writer import RowWriter
from doll.ps.model.updater import ContributionBuffer, ModelParts
from doll.ps.tables.bounded_ids import Totals
from doll.ps.tables.row_server import RowServer, StoredRows
from doll.ps.tables.store import TableStore
from doll.records.control import GetRows, ShardStatus
from doll.storage.blobs import (
    HEADER_BYTES,
    Blobs,
    Buffer,
    Latest,
    delta_key,
    encode_blob,
    encode_latest,
    finish_blob,
    latest_key,
    scope_of,
    weights_key,
)
from doll.storage.contributions import decode_contribution
from doll.storage.deltas import Layout, changes
from doll.storage.differences import RowChanges
from doll.storage.reads_ahead import ReadsAhead
from doll.telemetry import get_logger

log = get_logger(__name__)

_PREFETCH_BYTES: Final = 16 << 20  # limit for the gradients of one poll that are read in advance

_LARGE_BYTES: Final = 1 << 20
# A batch whose sparse gradient has NaN is computed again. If the model has diverged, the result has NaN again.
_MAX_NOT_FINITE: Final = 3


class FetchOutcome(NamedTuple):
    """The outcome of a FetchGradient.

    Attributes:
        blob: the gradient as the worker stored it, for the event log; None if the gradient was lost.
        num_bytes: size of the gradient's blobs.
        plain_row_bytes: size of the gradient's table rows before coding, with 8 bytes for each key.
    """

    event: GradientFetched | GradientLost
    blob: Buffer | None = None
    num_bytes: int = 0
    num_sent: int = 0
    plain_row_bytes: int = 0


class Host(Protocol):
    """Port: the model of one term, for the server. `ModelHost` describes the methods."""

    @property
    def num_values(self) -> int: ...
    def fetch(self, order: FetchGradient) -> FetchOutcome: ...
    def prefetch(self, keys: Sequence[str], coming: Sequence[str] = ()) -> None: ...
    def is_reading(self, key: str) -> bool: ...
    def apply(self, update: ApplyUpdate) -> int: ...
    def publish(self, version: int) -> str: ...
    def republish(self, version: int) -> str: ...
    def release(self, version: int) -> None: ...
    def tidy(self, named: Collection[int] = ()) -> None: ...
    def drop(self, key: str, held: int = 0) -> None: ...
    def store_rows(self, request: GetRows, version: int, *, subscribes: bool) -> StoredRows: ...
    def changed_rows(self, worker: int, version: int) -> StoredRows | None: ...
    def forget_rows(self, worker: int) -> None: ...
    def table_totals(self) -> dict[str, Totals]: ...
    def tensors(self) -> dict[str, npt.NDArray[Any]]: ...
    def row_changes(self) -> RowChanges | None: ...
    def forget_snapshot(self, version: int) -> None: ...
    def check(self) -> None: ...
    def shard_statuses(self) -> tuple[ShardStatus, ...]: ...
    def end(self) -> None: ...


class ModelHost:
    """The model of one term, in this process. Calls block until they are done; not thread-safe.

    Every call may raise ServiceUnavailableError: the blob store is unavailable, and the wait for the store was ended.
    If the store has shared memory, each version is computed in a part of this memory and published without a copy
    (docs/decisions/0029).
    """

    def __init__(
        self, config: JobConfig, term: int, updater: Updater, blobs: Blobs, tables: TableStore | None = None, *,
        run_id: str = "", is_shard: bool = False,
    ) -> None:  # fmt: skip
        """`tables`: the tables of the model; None: it has no tables. `run_id`: see `doll.ps.start.Start`. `is_shard`:
        whether another process publishes the pointer to the newest version, after `tidy` has stored changed rows."""
        self._waits_for_tidy = is_shard and tables is not None
        self._scope = scope_of(config.job, run_id)
        self._term = term
        self._ttl_s = config.blobs.ttl_s
        self._keep_versions = config.blobs.keep_versions
        self._updater = updater
        self._parts = ModelParts(updater, tables)
        self._blobs = blobs
        self._tables = tables
        self._table_shapes = {} if tables is None else tables.shapes
        self._rows = None if tables is None else RowServer(config, self._scope, term, tables, blobs)
        self._row_writer = None if tables is None else RowWriter(self._scope, term, blobs, self._ttl_s, tables)
        self._is_published = False  # whether the current model is published
        self._contributions = ContributionBuffer(updater, tables, config.training.policy.age_weight)
        self._deltas: DeltaWriter | None = None
        if config.training.policy.publishes_deltas:
            self._deltas = DeltaWriter(self._scope, term, blobs, config.blobs.ttl_s, updater.num_parameters)
            if tables is not None:
                tables.track_numbers()
        self._coming: set[str] = set()  # keys of gradients that are not fetched yet and may not be in the store yet
        self._ahead = ReadsAhead(self._read, _PREFETCH_BYTES // (HEADER_BYTES + 4 * self.num_values))
        self._published: deque[int] = deque()  # the newest published versions
        self._older: dict[int, None] = {}  # older versions that grants name, the oldest first
        self._max_older = config.data.places * min(2, config.training.policy.pushes_under_way)
        # The blob that contains the weights and no header yet; None if the weights are elsewhere or already published.
        self._unpublished: memoryview | None = None
        self._may_rewrite = False
        self._deleted: set[str] = set()
        self._unused: list[str] = []  # keys of blobs that can be deleted
        self._num_not_finite = 0  # number of sparse gradients since the last finite one
        self._pointed_at = -1  # version that the published `Latest` names
        self._clearing: Future[None] | None = None  # cleanup of a far store, which runs while the server continues

    @property
    def has_tables(self) -> bool:
        return self._tables is not None

    @property
    def num_values(self) -> int:
        """The number of values in the flat vector."""
        return int(self._updater.weights.size)

    def fetch(self, order: FetchGradient) -> FetchOutcome:
        """Get this gradient, and keep it until its update. An incomplete, foreign or missing gradient is reported as
        lost. Raises DivergedError if too many consecutive gradients are not finite; then do not use the host any
        more."""
        blob = self._ahead.get(order.key)
        self._coming.discard(order.key)
        try:
            if blob is None:
                raise BlobError("not in the blob store (any more)")
            decoded = decode_contribution(
                blob, self._updater.num_parameters, job=self._scope, version=order.version, numel=self.num_values,
                tables=self._table_shapes,
            )  # fmt: skip
        except BlobError as exc:
            if isinstance(exc, NotFiniteError):
                self._num_not_finite += 1
                if self._num_not_finite == _MAX_NOT_FINITE:
                    raise diverged(f"{_MAX_NOT_FINITE} times in a row, a gradient is") from exc
            log.warning("gradient_lost", key=order.key, reason=str(exc), action="its batch is computed again")
            return FetchOutcome(GradientLost(grant_id=order.grant_id, reason=str(exc)))
        self._num_not_finite = 0
        gradient = decoded.values
        max_change = self._updater.max_change(gradient)
        if self._tables is not None:
            max_change = max(max_change, self._tables.max_change(decoded.rows))
        self._contributions.put(order.grant_id, gradient, rows=decoded.rows, in_order=order.in_order)
        if order.in_order and len(blob) >= _LARGE_BYTES:  # so its memory can be used for the next gradient
            self._blobs.delete(order.key)
            self._deleted.add(order.key)
        fetched = GradientFetched(grant_id=order.grant_id, max_change=max_change)
        plain = sum(rows.ids.nbytes + rows.values.nbytes for rows in decoded.rows.values())
        return FetchOutcome(fetched, blob, len(blob), decoded.num_sent, plain)

    def add_in_order(self, order: FetchGradient) -> None:
        """Add the gradient of an order that `fetch` was given without `in_order`, as if it had been."""
        self._contributions.add_waiting(order.grant_id)
        self._blobs.delete(order.key)
        self._deleted.add(order.key)

    def prefetch(self, keys: Sequence[str], coming: Sequence[str] = ()) -> None:
        """Prepare for calls of `fetch` with these keys. `coming` is a subset of the keys, whose gradients may not be in
        the store yet. `fetch` waits for these gradients for a limited time."""
        self._coming.update(coming)
        if coming or self._blobs.is_far:  # the store may be near to the server and far from the workers
            self._ahead.begin(keys)
            return
        count = min(len(keys), _PREFETCH_BYTES // (HEADER_BYTES + 4 * self.num_values))
        if count > 1:
            self._blobs.prefetch(keys[:count])

    def _read(self, key: str) -> Buffer | None:
        return self._blobs.get_soon(key) if key in self._coming else self._blobs.get(key)

    def is_reading(self, key: str) -> bool:
        """Return whether the gradient under this key is still being read after `prefetch`. Then `fetch` would wait."""
        return self._ahead.is_reading(key)

    def apply(self, update: ApplyUpdate) -> int:
        """Make the version of `update` from its gradients, and return the number of samples that the version has
        learned from. Raises DivergedError if a value is not finite; then the host must not be used any more."""
        memory = self._unpublished if self._may_rewrite else None
        if memory is None and self.num_values:
            memory = self._blobs.reserve(HEADER_BYTES + 4 * self.num_values)
        into = None if memory is None else np.frombuffer(memory, np.float32, offset=HEADER_BYTES)
        num_samples = self._contributions.apply(update, into)
        self._is_published = False
        if into is not None and self._updater.weights.ctypes.data == into.ctypes.data:
            self._unpublished, self._may_rewrite = memory, True
        else:
            self._unpublished = None
        fault_point("ps.after_apply")
        keys = (item.push.key for item in update.sets if item.push.key)
        self._unused += (key for key in keys if key not in self._deleted)
        self._deleted.clear()
        return num_samples

    def publish(self, version: int) -> str:
        """Publish the weights, and return their blob key. After the return, workers can read the blob, which
        `doll.consumers.compute.gradient.CachedVersion` does. `version`: version of the current weights. If this
        version or a later one was already published, the call only returns the key."""
        key = weights_key(self._scope, self._term, version)
        if not self._published or version > self._published[-1]:
            self._put_weights(key, version)
            self._published.append(version)
            self._is_published = True
        return key

    def release(self, version: int) -> None:
        """Release a version that no grant names any more. The next `tidy` may delete its blob."""
        if version in self._older:
            del self._older[version]
            self._unused.append(weights_key(self._scope, self._term, version))
            if self._deltas is not None:
                self._unused.append(delta_key(self._scope, self._term, version))

    def tidy(self, named: Container[int] = ()) -> None:
        """Do the work for which no worker waits: update the pointer to the newest weights, and delete unused blobs.

        Call it after each event of the engine, after its grants are sent. A call without work costs nothing.

        Published weights are kept while they are among the newest (`blobs.keep_versions`). Older weights are kept while
        a grant names them, until `release`. There is at most one such older version for each worker, or two if a worker
        may send several pushes at a time. If there are more, the oldest are deleted first.

        Args:
            named: versions that grants name.
        """
        if self._clearing is not None and not self._clearing.done():
            return  # the cleanup of a far store is running; a later call will find it finished
        if self._clearing is not None:
            self._clearing = self._clearing.result()
        calls: list[Callable[[], None]] = []
        if self._published and (version := self._published[-1]) != self._pointed_at:
            if self._row_writer is not None and self._is_published:  # before the pointer, which readers follow
                stores, unused_rows = self._row_writer.publish(version)
                calls += stores
                self._unused += unused_rows
            latest = Latest(term=self._term, version=version, key=weights_key(self._scope, self._term, version))
            calls.append(partial(self._blobs.put, latest_key(self._scope), encode_latest(latest), self._ttl_s))
            self._pointed_at = version
        while len(self._published) > self._keep_versions:
            self._older[version := self._published.popleft()] = None
            if version not in named:
                self.release(version)
        while len(self._older) > self._max_older:  # workers may have grants with different versions
            self.release(next(iter(self._older)))
        if self._unused:
            unused, self._unused = self._unused, []
            calls.append(partial(self._blobs.delete, *unused))
        if calls and self._blobs.is_far and not self._waits_for_tidy:
            self._clearing = in_thread(partial(_call_all, calls), "clear")
        else:
            _call_all(calls)

    def _put_weights(self, key: str, version: int) -> None:
        if self._deltas is not None:
            self._deltas.put(self._updater.weights, version)
        memory, self._unpublished = self._unpublished, None
        if memory is None:
            parts = encode_blob(self._updater.weights, job=self._scope, kind="w", version=version)
        else:
            finish_blob(memory, job=self._scope, kind="w", version=version)
            parts = [memory]
        self._blobs.put(key, parts, self._ttl_s)

    def republish(self, version: int) -> str:
        """Publish a version again, because a worker has not found the version's blob."""
        if version in self._published:
            self._published.remove(version)
        self._pointed_at = -1  # the blob of the pointer may be lost as well
        return self.publish(version)

    def store_rows(self, request: GetRows, version: int, *, subscribes: bool) -> StoredRows:
        """Put the rows of `version` that a worker asks for into the blob store; see `RowServer.answer`."""
        if self._rows is None:
            raise BlobError(f"worker {request.worker} asks for rows, but the model has no tables")
        return self._rows.answer(request, version, subscribes=subscribes)

    def changed_rows(self, worker: int, version: int) -> StoredRows | None:
        """Put the rows of `worker` that have changed into the blob store; see `RowServer.changes`."""
        return None if self._rows is None else self._rows.changes(worker, version)

    def forget_rows(self, worker: int) -> None:
        """Forget the rows to which `worker` has subscribed, because its new process has not asked for rows yet."""
        if self._rows is not None:
            self._rows.forget(worker)

    def table_totals(self) -> dict[str, Totals]:
        return {} if self._tables is None else self._tables.totals

    def drop(self, key: str, held: int = 0) -> None:
        """Delete the blob of a gradient that will not be applied, and forget the set `held` (0: no set)."""
        self._ahead.forget(key)
        self._coming.discard(key)
        if held:
            self._contributions.drop(held)
        self._blobs.delete(key)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return weights and state by name, for a checkpoint. Later updates do not change these arrays."""
        self._may_rewrite = False  # weights in shared memory are returned without a copy
        return self._parts.tensors()

    def forget_snapshot(self, version: int) -> None:
        """Do nothing, because the tensors of a checkpoint that will not be saved are freed with it."""

    def check(self) -> None:
        """Do nothing, because the model is in this process. `ShardedHost` checks its shards."""

    def shard_statuses(self) -> tuple[ShardStatus, ...]:
        return ()

    def end(self) -> None:
        """Do nothing at the end of the job. `ShardedHost` lets its shards exit."""

    def row_changes(self) -> RowChanges | None:
        """Return which rows of `tensors` change, for a differential checkpoint. None: the model has no tables."""
        return None if self._tables is None else self._tables.row_changes()

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self._unpublished = None
        self._parts.load(tensors)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class DeltaWriter:
    """Publishes, in addition to the weights of each version, the difference to the version before. Keeps a copy of the
    weights of the last call.
    """

    def __init__(self, scope: str, term: int, blobs: Blobs, ttl_s: float, num_parameters: int) -> None:
        self._scope = scope
        self._term = term
        self._blobs = blobs
        self._ttl_s = ttl_s
        self._num_parameters = num_parameters
        self._before: npt.NDArray[np.float32] | None = None
        self._version = -1  # of `_before`

    def put(self, weights: npt.NDArray[np.float32], version: int) -> None:
        """Store the changes since the version of the last call, if the changes take less memory than all weights.
        `weights`: float32, shape (numel,)."""
        if version <= self._version:  # the version is published a second time
            return
        before, since = self._before, self._version
        if before is None:
            self._before, self._version = weights.copy(), version
            return
        layout = Layout(weights.size, self._num_parameters)
        delta = changes(before, weights, layout, job=self._scope, since=since, version=version)
        if delta is not None:
            self._blobs.put(delta_key(self._scope, self._term, version), delta, self._ttl_s)
        before[:] = weights
        self._version = version
