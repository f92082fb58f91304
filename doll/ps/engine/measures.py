"""The measures of a consistency policy (staleness, blocked time, bytes), in live jobs and simulations, and those of
freshness. Pure.

Measuring a batch takes a few microseconds (about one under exact versions), for any number of workers.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from doll.config.freshness import FreshnessConfig
from doll.ps.engine.engine import VOID, Engine
from doll.ps.engine.events import AppliedSet, ApplyUpdate
from doll.records.control import Measures
from doll.records.event_times import NO_LATENCIES, EventTimes
from doll.storage.sections import WireSize
from doll.theory.staleness import ALL_UP_TO, HISTORY, StalenessMeter

_FIRST_READ: Final = -1  # lower than every version
_AS_PUSH: Final = -1  # placeholder: the batch was computed with the version that its push names
_SKIPPED: Final = -1  # number of the batch in the push of a range without records (ADR 47)


class PolicyMeasures:
    """The measures over one server's term.

    Staleness is measured for every applied batch, at the version that its push names. A worker is blocked while it
    holds a complete batch, computes nothing, and has no grant. The time in which a grant is sent counts as blocked.
    """

    def __init__(self, engine: Engine, *, weights_bytes: int = 0) -> None:
        """`weights_bytes`: size of one version as workers read it, which is also the size of a dense gradient."""
        self._engine = engine
        self._weights_bytes = weights_bytes
        # Under exact versions, all gradients belong to the newest version. So no history is needed, and one comparison
        # for each gradient is enough.
        exact = engine.policy.exact_version
        self._learned = [worker.applied for worker in engine.workers()]  # batches of each worker in the model
        self._meter = StalenessMeter(
            self._learned,
            version=engine.version,
            history=0 if exact else HISTORY,
            all_up_to=0 if exact else ALL_UP_TO,
            is_live=lambda number: engine.worker(number).is_live,
            minimum_clock=engine.policy.minimum_clock,
        )
        for number, batches in enumerate(self._learned):
            if offset := engine.policy.clock_offset(number):  # it outlives the server
                self._meter.joined(number, batches + offset)
        self._pushed_at_s: dict[int, float] = {}  # time of the last push of each worker's process
        self._read: dict[int, int] = {}  # newest version that each worker's process has read
        self.blocked_s = 0.0
        self.computing_s = 0.0
        self.idle_s = 0.0
        self._gradient_bytes = self._gradient_values = self._dense_gradient_bytes = self._read_bytes = 0
        self._row_bytes = self._plain_row_bytes = self._row_request_bytes = 0

    def joined(self, worker: int) -> None:
        """Note that the engine has welcomed a new process of this worker."""
        self._pushed_at_s.pop(worker, None)
        self._read.pop(worker, None)
        self._joined(worker)

    def _joined(self, worker: int, version: int = 0) -> None:
        """Set the worker's clock after a join, so that nobody waits for the batches that this worker has missed.

        Earlier versions than `version` do not contain the clocks that it has missed.
        """
        if self._engine.version:  # at version 0 all workers begin at clock 0, and none has missed a batch
            offset = self._engine.policy.clock_offset(worker)
            self._meter.joined(worker, None if offset is None else self._learned[worker] + offset, version)

    def fetched(self, size_bytes: int, num_values: int = 0, plain_row_bytes: int = 0) -> None:
        """Note that the gradient of a set has arrived. `size_bytes`: size of its blob. `num_values`: count of numbers
        in the blob. `plain_row_bytes`: size of the blob's table rows before coding."""
        self._gradient_bytes += size_bytes
        self._gradient_values += num_values
        self._dense_gradient_bytes += self._weights_bytes + plain_row_bytes

    def sent_rows(self, size: WireSize, request_bytes: int = 0) -> None:
        """Note that rows of tables are sent to a worker. `request_bytes`: size of the blob that asked for them."""
        self._row_request_bytes += request_bytes
        self._row_bytes += size.coded_bytes
        self._plain_row_bytes += size.plain_bytes

    def sent_version(self, worker: int, version: int) -> None:
        self._read_bytes += self._weights_bytes
        self._read[worker] = version

    def applied(self, update: ApplyUpdate) -> None:
        """Note that an update was applied. Call it once for each update, in order."""
        learned = [item for item in update.sets if item.push.batches]
        if learned and learned[0].push.batches[0].batch == _SKIPPED:  # the only set of its update
            worker, count = learned.pop().push.worker, update.sets[0].batches[0].count
            self._meter.skipped(worker, count)
            self._learned[worker] += count
        for worker, version in self._engine.policy.take_raised().items():
            self._joined(worker, version)
        for item in learned:
            push = item.push
            clock = self._learned[push.worker]
            self._learned[push.worker] += len(push.batches)
            if push.batches[0].version in (_AS_PUSH, push.version):
                self._meter.read(push.worker, push.version, clock, len(push.batches))
            else:  # versions rise from batch to batch, and the last one is the version of the push
                for at, batch in enumerate(push.batches, clock):
                    version = push.version if batch.version == _AS_PUSH else batch.version
                    self._meter.read(push.worker, version, at)
            self._add_times(item)
            if push.version > self._read.get(push.worker, _FIRST_READ):
                self._read[push.worker] = push.version
                self._read_bytes += push.delta_bytes or self._weights_bytes
        for item in learned:
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


class FreshnessMeter:
    """The latencies of one parameter server, since its start."""

    def __init__(self, config: FreshnessConfig) -> None:
        self.learned = self.durable = NO_LATENCIES
        self._config = config
        self._waiting: deque[tuple[int, EventTimes]] = deque()  # batches by version that are not durable

    def applied(self, update: ApplyUpdate, at_s: float) -> None:
        """Count the records of an update that has made a version."""
        limits_s = self._config.event_to_learned_s, self._config.max_ahead_s
        for item in (item for applied in update.sets for item in applied.push.batches):
            self.learned = self.learned.with_batch(item.known_times, at_s, *limits_s)
            self._waiting.append((update.version, item.known_times))

    def stored(self, version: int, at_s: float) -> None:
        """Count the records that the checkpoint of `version` has made durable."""
        limits_s = self._config.event_to_durable_s, self._config.max_ahead_s
        while self._waiting and self._waiting[0][0] <= version:
            self.durable = self.durable.with_batch(self._waiting.popleft()[1], at_s, *limits_s)
