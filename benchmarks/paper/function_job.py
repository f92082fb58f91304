"""A learning job on cloud functions, as MLLess runs it, in virtual time.

A setting of `doll_lab.simulation.world`: the engine and policy, the worker's protocol and significance filter, its
blobs, the scale-in tuner and the cost formula are those of production. What is simulated is time: how long a batch
takes, and when a message arrives. As in MLLess, each worker writes its steps into a key-value store and reads those of
every other worker from there. What a worker computes on is what a real one would have: the version that its grant
allows, its own steps that this does not hold, and what its filter holds back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappush
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from doll.config.policy import PolicyConfig
from doll.consumers.protocol.worker_core import GradientDone
from doll.optim.significance_filter import Residual
from doll.provisioner.planning.tuner import LossHistory, ScaleInTuner
from doll.ps.engine.events import ApplyUpdate, EngineAction, Event, FetchGradient, GradientFetched, RollBack
from doll.records.control import AnyRecord, Push
from doll.storage.contributions import Compressor

from benchmarks.paper.factorization import Factorization
from benchmarks.paper.function_cost import functions_usd
from doll_lab.simulation.timed_world import MESSAGE, UNBOUNDED, TimedProcess, TimedWorld

Vector = npt.NDArray[np.float32]

_JOB = "paper"


class Step(NamedTuple):
    """What a worker makes of one batch: the change of the parameters, shape (num_parameters,), and its loss before."""

    values: Vector
    loss_sum: float
    num_samples: int


class Problem(Protocol):
    """What is learned. A batch depends on its worker and number only, whenever it is computed."""

    def start(self) -> Vector:
        """First parameters, shape (num_parameters,)."""
        ...

    def step(self, parameters: Vector, worker: int, batch: int) -> Step:
        """One batch of one worker, at these parameters."""
        ...

    def loss(self, parameters: Vector) -> float:
        """Of all data."""
        ...


class Factors:
    """`Problem` of a matrix factorisation without momentum and regularisation: a step is -rate times the sum of the
    batch's gradients.

    Args:
        batch: entries of one batch, drawn without repetition from those of its worker.
        workers: whose shards are equal; 0: each draws from all entries, as from an object store.
        spread: of the first factors.
    """

    def __init__(
        self, data: Factorization, *, rate: float, batch: int, workers: int, spread: float = 0.3, seed: int = 0
    ) -> None:
        self.data = data
        self._rate, self._batch, self._spread, self._seed = rate, batch, spread, seed
        self._shards = data.shards(workers) if workers else [np.arange(len(data.value))]

    def start(self) -> Vector:
        return self.data.start(self._spread, np.random.default_rng((self._seed, 1))).astype(np.float32)

    def step(self, parameters: Vector, worker: int, batch: int) -> Step:
        rng = np.random.default_rng((self._seed, 2, worker, batch))
        picked = rng.choice(self._shards[worker % len(self._shards)], self._batch, replace=False)
        gradient, mse = self.data.gradient(parameters, picked)
        return Step((-self._rate * gradient).astype(np.float32), mse * self._batch, self._batch)

    def loss(self, parameters: Vector) -> float:
        return self.data.mse(parameters)


class Store:
    """A key-value store of shards, each of which serves one request after the other; worker w writes to w mod shards.

    Args:
        link_bytes_per_s: of each worker, in one direction at a time.
        shard_bytes_per_s: of each shard, to all workers together.
        latency_s: of each value that is written or read.

    Attributes:
        busy_s: for how long each shard has served requests, those included that it has taken on.
    """

    def __init__(
        self, link_bytes_per_s: float, *, shards: int = 1, shard_bytes_per_s: float = math.inf, latency_s: float = 0.0
    ) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._shard_bytes_per_s = shard_bytes_per_s
        self._latency_s = latency_s
        self._free_at_s = [0.0] * shards
        self.busy_s = [0.0] * shards

    def put(self, worker: int, num_bytes: int, now_s: float) -> float:
        """When what this worker writes is there."""
        return self._serve({worker: num_bytes}, now_s)

    def get(self, worker: int, num_bytes: Mapping[int, int], now_s: float) -> float:
        """When this worker has read so many bytes that each of these workers wrote."""
        return self._serve(num_bytes, now_s) if num_bytes else now_s

    def _serve(self, num_bytes: Mapping[int, int], now_s: float) -> float:
        of_shards = [0] * len(self._free_at_s)
        for source, size in num_bytes.items():
            of_shards[source % len(of_shards)] += size
        done_s = now_s + sum(of_shards) / self._link_bytes_per_s
        for shard, size in enumerate(of_shards):
            busy_s = size / self._shard_bytes_per_s
            self.busy_s[shard] += busy_s
            if size:
                self._free_at_s[shard] = max(self._free_at_s[shard], now_s) + busy_s
                done_s = max(done_s, self._free_at_s[shard])
        return done_s + self._latency_s * len(num_bytes)


class DenseRing(Store):
    """All-reduce of the whole gradient in a ring of machines: 2 (P - 1) / P of it pass each link in a step."""

    def __init__(self, link_bytes_per_s: float, *, num_parameters: int, workers: int, latency_s: float = 0.0) -> None:
        super().__init__(link_bytes_per_s)
        self._step_s = 2 * (workers - 1) / workers * 4 * num_parameters / link_bytes_per_s + latency_s

    def put(self, worker: int, num_bytes: int, now_s: float) -> float:
        return now_s + self._step_s

    def get(self, worker: int, num_bytes: Mapping[int, int], now_s: float) -> float:
        return now_s


class Point(NamedTuple):
    """The job when all workers have made one step more."""

    time_s: float
    step: int
    workers: int
    usd: float  # spent on functions until now
    loss: float
    values_sent: int  # numbers that workers have sent until now


@dataclass
class Outcome:
    """One run.

    Attributes:
        points: one per step.
        num_batches: of which workers sent the step.
        bytes_sent: of their blobs, as written.
        bytes_read: of the others' blobs, over all workers.
    """

    points: list[Point] = field(default_factory=list)
    num_batches: int = 0
    bytes_sent: int = 0
    bytes_read: int = 0

    @property
    def last(self) -> Point:
        return self.points[-1]


@dataclass
class _Worker:
    """What a worker has beside the protocol: the parameters that it computes on, and what it has not sent."""

    view: Vector
    residual: Residual
    version: int = 0  # below `view`
    pushed: deque[tuple[int, Vector]] = field(default_factory=deque)  # own steps that `version` may not hold
    snapshot: tuple[int, Vector] | None = None  # own batches in the weights that it reads, and these weights
    is_leaving: bool = False


class _Blob(NamedTuple):
    """A contribution on its way. `losses`: of its batches, means over their samples."""

    values: Vector
    num_bytes: int
    losses: tuple[float, ...]


class FunctionJob(TimedWorld):
    """P workers that learn one problem.

    Args:
        compute_s: seconds that worker `w` computes on its batch `n`: compute_s(w, n).
        tuner: removes workers; default: nobody leaves.
        residual: makes a worker's filter, of the policy's threshold and the number of parameters.
        add_s_per_byte: seconds in which a worker adds a byte of another one's update to its weights.
    """

    def __init__(
        self, problem: Problem, policy: PolicyConfig, workers: int, store: Store,
        compute_s: Callable[[int, int], float], *, tuner: ScaleInTuner | None = None,
        residual: Callable[[float, int], Residual] = Residual, add_s_per_byte: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            policy, num_workers=workers, on={MESSAGE: self._on_stored}, seconds_of=self._get_and_compute_s,
            checkpoint_every_updates=UNBOUNDED,
        )  # fmt: skip
        self.weights = problem.start()
        self.outcome = Outcome()
        self._problem, self._store, self._compute_s, self._tuner = problem, store, compute_s, tuner
        self._add_s_per_byte = add_s_per_byte
        threshold = policy.filter_threshold
        self._workers = [_Worker(self.weights.copy(), residual(threshold, len(self.weights))) for _ in range(workers)]
        self._num_workers = workers
        self._history = LossHistory()
        self._blobs: dict[str, _Blob] = {}
        self._on_their_way: list[Push | None] = [None] * workers
        self._sizes: list[list[tuple[int, int]]] = [[]]  # of each version: (worker, bytes) of what made it
        self._snapshot: tuple[int, Vector] = (0, self.weights.copy())
        self._worker_s = self._worker_s_at = 0.0  # until when
        self._step_batches = self._step = self._values_sent = 0
        self._losses: list[float] = []
        self._is_reached = False
        self._is_over: Callable[[Point], bool] = lambda point: False

    def run(self, *, target: float, most_steps: int, least_usd: float = 0.0, least_s: float = 0.0) -> Outcome:
        """Learn until the loss was at most `target` once, and at least for so long and so much; or so many steps.

        Raises:
            RuntimeError: a worker has lost a part of its steps.
        """

        def is_over(at: Point) -> bool:
            self._is_reached |= at.loss <= target
            is_enough = at.usd >= least_usd and at.time_s >= least_s
            return (self._is_reached and is_enough) or at.step >= most_steps

        self._is_over = is_over
        for number in range(self._num_workers):
            self.start_process(number).cached = 0
        for number in range(self._num_workers):
            self._read(number, 1)
        self.run_until()
        return self.outcome

    # --- the server -------------------------------------------------------------------------------------------------

    def perform(self, action: EngineAction) -> Event | None:
        if isinstance(action, FetchGradient):
            return GradientFetched(grant_id=action.grant_id)
        if isinstance(action, ApplyUpdate):
            self._on_update(action)
        return super().perform(action)

    def roll_back(self, action: RollBack) -> None:
        raise RuntimeError(f"the server would begin again from a checkpoint, and there is none: {action.reason}")

    def _on_update(self, update: ApplyUpdate) -> None:
        sizes = []
        for item in update.sets:
            blob = self._blobs.pop(item.push.key)
            self.weights += blob.values
            sizes.append((item.push.worker, blob.num_bytes))
            self._step_batches += len(blob.losses)
            self._losses += blob.losses
        self._sizes.append(sizes)
        self._snapshot = (update.version, self.weights.copy())
        # A round is a step, also where a worker that has left is in it.
        if self._step_batches and (self.engine.policy.exact_version or self._step_batches == self._num_workers):
            self._on_step()

    def _on_step(self) -> None:
        self._worker_s, self._worker_s_at = self._worker_seconds(), self.now
        self._step += 1
        self._step_batches = 0
        loss = float(np.mean(self._losses))
        self._losses.clear()
        usd = functions_usd(self._worker_s, self.now, self.now)
        after = self._problem.loss(self.weights)
        self.outcome.points.append(Point(self.now, self._step, self._num_workers, usd, after, self._values_sent))
        if self._tuner is not None:
            self._history.observe(self._step, loss, self.now)
            if self._tuner.ask(self._history, self.now).remove:
                self._tuner.removed(self._history, self.now)
                next(worker for worker in reversed(self._workers) if not worker.is_leaving).is_leaving = True

    def _worker_seconds(self) -> float:
        return self._worker_s + self._num_workers * (self.now - self._worker_s_at)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _get_and_compute_s(self, worker: int, batch: int) -> float:
        """It reads the weights that its grant asks for, if it has older ones, and computes."""
        process, state = self.process(worker), self._workers[worker]
        read_s = 0.0
        if state.version < process.cached:
            num_bytes: dict[int, int] = {}
            for sizes in self._sizes[state.version + 1 : process.cached + 1]:
                for source, size in sizes:
                    if source != worker:
                        num_bytes[source] = num_bytes.get(source, 0) + size
            self.outcome.bytes_read += sum(num_bytes.values())
            version, weights = self._snapshot
            assert version == process.cached, "a grant names the newest version"
            included = process.protocol.newest(process.first_order.grant).included
            state.version, state.snapshot = version, (included, weights)
            read_s = self._store.get(worker, num_bytes, self.now) - self.now
            read_s += self._add_s_per_byte * sum(num_bytes.values())
        return read_s + self._compute_s(worker, batch)

    def _on_computed(self, worker: int, number: int) -> None:
        state, batch = self._workers[worker], self.process(worker).first_order.grant.first
        if state.snapshot is not None:
            included, weights = state.snapshot
            state.snapshot = None
            while state.pushed and state.pushed[0][0] < included:
                state.pushed.popleft()
            state.view[:] = weights
            for _, own in state.pushed:
                state.view += own
            state.residual.add_to(state.view)
        step = self._problem.step(state.view, worker, batch)
        values = step.values
        state.view += values
        if state.residual.is_used:
            state.residual.split(values, state.view, batch, state.version)
        state.pushed.append((batch, values))
        self._store_blob(self._key_of(worker, batch), worker, values, (step.loss_sum / step.num_samples,))
        super()._on_computed(worker, number)

    def _store_blob(self, key: str, worker: int, values: Vector, losses: tuple[float, ...]) -> None:
        parts = Compressor(_JOB, len(values)).compress(values, version=self._workers[worker].version)
        size = sum(memoryview(part).nbytes for part in parts)
        self._blobs[key] = _Blob(values, size, losses)
        self._values_sent += int(np.count_nonzero(values))
        self.outcome.num_batches += len(losses)
        self.outcome.bytes_sent += size

    def _key_of(self, worker: int, batch: int) -> str:
        return f"{worker}/{batch}"

    def _holds_back(self, worker: int) -> bool:
        return self._workers[worker].residual.is_held

    def to_server(self, process: TimedProcess, record: AnyRecord) -> None:
        """A push is sent when what it names is in the store; other records take no time."""
        if not isinstance(record, Push):
            super().to_server(process, record)
            return
        worker = process.worker
        self._on_their_way[worker] = record
        at_s = self._store.put(worker, self._blobs[record.key].num_bytes, self.now)
        heappush(self._queue, (at_s, MESSAGE, worker, 0))

    def _read_next(self, worker: int) -> None:
        protocol = self.process(worker).protocol
        self._read(worker, protocol.served[protocol.worker].next_batch + 1)

    def _on_stored(self, worker: int, number: int) -> None:
        push, self._on_their_way[worker] = self._on_their_way[worker], None
        assert push is not None, "a worker sends one push after the other"
        process, state = self.process(worker), self._workers[worker]
        if not self.engine.policy.exact_version:
            self._read_next(worker)  # a policy with clocks does not wait for a worker without a batch
        self.handle(push)
        rest = process.protocol.rest
        if not state.is_leaving:
            if self.engine.policy.exact_version:
                self._read_next(worker)
        elif rest is not None and (held := state.residual.below(rest.until)) is not None:
            # A worker that leaves sends what it holds back first.
            state.residual.clear()
            key = f"{self._key_of(worker, rest.until)}/rest"
            self._store_blob(key, worker, held, ())
            self.do(process, process.protocol.rest_stored(rest, GradientDone(key, state.version, ())))
        else:
            self._worker_s, self._worker_s_at = self._worker_seconds(), self.now
            self._num_workers -= 1
            self.do(process, process.protocol.leave("scale-in"))
        if self.outcome.points and self._is_over(self.outcome.last):
            self._queue.clear()
