"""The consistency policy's gain and cost: staleness, blocked time, bytes; live and in simulations. Pure.

A batch costs a few microseconds, one of exact versions about one, whatever the number of workers.
"""

from __future__ import annotations

from typing import Final

from doll.ps.engine.engine import VOID, Engine
from doll.ps.engine.events import AppliedSet, ApplyUpdate
from doll.records.control import Measures
from doll.storage.sections import WireSize
from doll.theory.staleness import ALL_UP_TO, HISTORY, StalenessMeter

_FIRST_READ: Final = -1
_AS_PUSH: Final = -1  # a batch's version


class PolicyMeasures:
    """Counts over one server's term.

    Staleness is of every batch that is applied, at the version that its push names. A worker is blocked while it holds
    a complete batch, computes nothing, and has no grant; the time that a grant takes to arrive counts as blocked.
    """

    def __init__(self, engine: Engine, *, weights_bytes: int = 0) -> None:
        """`weights_bytes`: of one version as workers read it, which is also the size of a dense gradient."""
        self._engine = engine
        self._weights_bytes = weights_bytes
        # Gradients of exact versions are of the newest one, and many: nothing is kept for them, and one comparison each
        # is enough.
        exact = engine.policy.exact_version
        self._learned = [worker.applied for worker in engine.workers()]  # batches of each worker in the model
        self._meter = StalenessMeter(
            self._learned,
            version=engine.version,
            history=0 if exact else HISTORY,
            all_up_to=0 if exact else ALL_UP_TO,
            is_active=lambda number: engine.worker(number).is_live and engine.policy.is_waited_for(number),
        )
        self._pushed_at_s: dict[int, float] = {}  # the last push of each worker's process
        self._read: dict[int, int] = {}  # the newest version that each worker's process has read
        self.blocked_s = 0.0
        self.computing_s = 0.0
        self.idle_s = 0.0
        self._gradient_bytes = self._gradient_values = self._dense_gradient_bytes = self._read_bytes = 0
        self._row_bytes = self._plain_row_bytes = self._row_request_bytes = 0

    def joined(self, worker: int) -> None:
        """The engine has welcomed a new process of this worker."""
        self._pushed_at_s.pop(worker, None)
        self._read.pop(worker, None)
        self._joined(worker)

    def _joined(self, worker: int) -> None:
        """Nobody waits for what this worker has missed."""
        if self._engine.version:  # else all begin at 0, and nobody has missed anything
            offset = self._engine.policy.clock_offset(worker)
            self._meter.joined(worker, None if offset is None else self._learned[worker] + offset)

    def fetched(self, size_bytes: int, num_values: int = 0, plain_row_bytes: int = 0) -> None:
        """The gradient of a set has come, in a blob of this size with so many numbers; those of tables' rows would be
        `plain_row_bytes` without coding."""
        self._gradient_bytes += size_bytes
        self._gradient_values += num_values
        self._dense_gradient_bytes += self._weights_bytes + plain_row_bytes

    def sent_rows(self, size: WireSize, request_bytes: int = 0) -> None:
        """A worker is sent rows of tables, for which it has asked in a blob of so many bytes."""
        self._row_request_bytes += request_bytes
        self._row_bytes += size.coded_bytes
        self._plain_row_bytes += size.plain_bytes

    def sent_version(self, worker: int, version: int) -> None:
        self._read_bytes += self._weights_bytes
        self._read[worker] = version

    def applied(self, update: ApplyUpdate) -> None:
        """An update was applied. Call it once for each, in order."""
        for worker in self._engine.policy.take_raised():
            self._joined(worker)
        for item in update.sets:
            push = item.push
            if not push.batches:
                continue
            if (count := item.batches[0].count) > 1:
                self._meter.skipped(push.worker, count)
                self._learned[push.worker] += count
                continue
            clock = self._learned[push.worker]
            self._learned[push.worker] += len(push.batches)
            if push.batches[0].version in (_AS_PUSH, push.version):
                self._meter.read(push.worker, push.version, clock, len(push.batches))
            else:  # versions rise from batch to batch, and the push has the last one
                for at, batch in enumerate(push.batches, clock):
                    version = push.version if batch.version == _AS_PUSH else batch.version
                    self._meter.read(push.worker, version, at)
            self._add_times(item)
            if push.version > self._read.get(push.worker, _FIRST_READ):
                self._read[push.worker] = push.version
                self._read_bytes += push.delta_bytes or self._weights_bytes
        for item in update.sets:
            if item.push.batches and item.batches[0].count == 1:
                self._meter.applied(item.push.worker, update.version, self._learned[item.push.worker])

    def _add_times(self, item: AppliedSet) -> None:
        push = item.push
        computing_s = push.fetch_s + push.store_s
        for batch in push.batches:
            computing_s += batch.compute_s
        self.computing_s += computing_s
        before_s = self._pushed_at_s.get(push.worker)
        self._pushed_at_s[push.worker] = item.received_at_s
        if before_s is not None:
            idle_s = max(0.0, item.received_at_s - computing_s - before_s)
            self.idle_s += idle_s
            self.blocked_s += min(idle_s, max(batch.wait_s for batch in push.batches))

    def report(self) -> Measures:
        histogram = self._meter.histogram
        return Measures(
            staleness=dict(histogram.counts),
            staleness_total=histogram.total,
            older_reads=histogram.older,
            blocked_s=self.blocked_s,
            computing_s=self.computing_s,
            idle_s=self.idle_s,
            gradient_bytes=self._gradient_bytes,
            gradient_values=self._gradient_values,
            dense_gradient_bytes=self._dense_gradient_bytes,
            weights_bytes=self._read_bytes,
            row_bytes=self._row_bytes,
            plain_row_bytes=self._plain_row_bytes,
            row_request_bytes=self._row_request_bytes,
            void_batches=self._engine.counters[VOID] - self._engine.start.counters.get(VOID, 0),
        )
