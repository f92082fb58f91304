"""A learning job on cloud functions, as MLLess runs it, in virtual time.

The parameter server's engine and policy, the worker's significance filter, its blobs, the scale-in tuner and the cost
formula are those of production; what is simulated is time: how long a batch takes and when a message arrives. As in
MLLess, each worker writes its steps into a key-value store and reads those of every other worker from there. What a
worker computes on is what a real one would have: the version that its grant allows, its own steps that this does not
hold, and what its filter holds back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from doll.config import StopConfig
from doll.config.policy import PolicyConfig
from doll.consumers.compute.significance_filter import Residual
from doll.provisioner.planning.loss_history import LossHistory
from doll.provisioner.planning.tuner import ScaleInTuner
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import ApplyUpdate, Event, FetchGradient, GradientFetched, RollBack
from doll.ps.engine.state import EngineSettings
from doll.ps.policies import make_policy
from doll.records.control import Announce, Grant, Join, Leave, Push, PushedBatch, Welcome
from doll.storage.contributions import Compressor

from benchmarks.paper.factorization import Factorization
from benchmarks.paper.function_cost import functions_usd

Vector = npt.NDArray[np.float32]

_TERM, _NEVER, _NEVER_S = 1, 1 << 40, 1e18
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
    view: Vector
    residual: Residual
    session: int = 0
    cached: int = 0  # version below `view`
    next_batch: int = 0
    pushed: deque[tuple[int, Vector]] = field(default_factory=deque)  # own steps that `cached` may not hold
    snapshot: tuple[int, int, Vector] | None = None  # version and own batches in it, on its way
    is_leaving: bool = False


class FunctionJob:
    """P workers that learn one problem.

    Args:
        compute_s: seconds that worker `w` computes on its batch `n`: compute_s(w, n).
        tuner: removes workers; default: nobody leaves.
        residual: makes a worker's filter, of the policy's threshold and the number of parameters.
    """

    def __init__(
        self, problem: Problem, policy: PolicyConfig, workers: int, store: Store,
        compute_s: Callable[[int, int], float], *, tuner: ScaleInTuner | None = None,
        residual: Callable[[float, int], Residual] = Residual,
    ) -> None:  # fmt: skip
        settings = EngineSettings(
            num_workers=workers, records_per_batch=1, max_pending_batches=_NEVER, lease_s=_NEVER_S,
            grant_timeout_s=_NEVER_S, checkpoint_every_updates=_NEVER, checkpoint_every_s=_NEVER_S, stop=StopConfig(),
        )  # fmt: skip
        self.engine = Engine(settings, make_policy(policy), term=_TERM, now=0.0, origins=[0] * workers)
        self.weights = problem.start()
        self.outcome = Outcome()
        self.now_s = 0.0
        self._problem, self._store, self._compute_s, self._tuner = problem, store, compute_s, tuner
        threshold = policy.filter_threshold
        self._workers = [_Worker(self.weights.copy(), residual(threshold, len(self.weights))) for _ in range(workers)]
        self._num_workers = workers
        self._history = LossHistory()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._blobs: dict[str, tuple[Vector, int]] = {}  # contributions on their way, and their bytes
        self._sizes: list[list[tuple[int, int]]] = [[]]  # of each version: (worker, bytes) of what made it
        self._snapshot: tuple[int, Vector] = (0, self.weights.copy())
        self._worker_s = self._worker_s_at = 0.0  # until when
        self._step_batches = self._step = self._values_sent = 0
        self._losses: list[float] = []

    def run(self, *, target: float, most_steps: int, least_usd: float = 0.0, least_s: float = 0.0) -> Outcome:
        """Learn until the loss was at most `target` once, and at least for so long and so much; or so many steps.

        Raises:
            RuntimeError: a worker has lost a part of its steps.
        """
        for number, worker in enumerate(self._workers):
            for action in self._handle(Join(worker=number, process=f"{number}")):
                if isinstance(action, Welcome):
                    worker.session = action.session
        for number in range(len(self._workers)):
            self._announce(number)
        reached = False
        while self._queue:
            self.now_s, _, event = heappop(self._queue)
            event()
            if self.outcome.points:
                at = self.outcome.last
                reached = reached or at.loss <= target
                if (reached and at.usd >= least_usd and at.time_s >= least_s) or at.step >= most_steps:
                    break
        return self.outcome

    # --- the server -------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Any]:
        actions: list[Any] = self.engine.handle(event, self.now_s)
        for action in actions:
            if isinstance(action, Grant):
                self._on_grant(action)
            elif isinstance(action, FetchGradient):
                self._handle(GradientFetched(grant_id=action.grant_id))
            elif isinstance(action, ApplyUpdate):
                self._on_update(action)
            elif isinstance(action, RollBack):
                raise RuntimeError(
                    f"the server would begin again from a checkpoint, and there is none: {action.reason}"
                )
        return actions

    def _on_update(self, update: ApplyUpdate) -> None:
        sizes = []
        for item in update.sets:
            values, size = self._blobs.pop(item.push.key)
            self.weights += values
            sizes.append((item.push.worker, size))
            self._step_batches += len(item.push.batches)
            self._losses += [batch.loss_sum / batch.n_samples for batch in item.push.batches]
        self._sizes.append(sizes)
        self._snapshot = (update.version, self.weights.copy())
        # A round is a step, also where a worker that has left is in it.
        if self._step_batches and (self.engine.policy.exact_version or self._step_batches == self._num_workers):
            self._on_step()

    def _on_step(self) -> None:
        self._worker_s, self._worker_s_at = self._worker_seconds(), self.now_s
        self._step += 1
        self._step_batches = 0
        loss = float(np.mean(self._losses))
        self._losses.clear()
        usd = functions_usd(self._worker_s, self.now_s, self.now_s)
        after = self._problem.loss(self.weights)
        self.outcome.points.append(Point(self.now_s, self._step, self._num_workers, usd, after, self._values_sent))
        if self._tuner is not None:
            self._history.observe(self._step, loss, self.now_s)
            if self._tuner.ask(self._history, self.now_s).remove:
                self._tuner.removed(self._history, self.now_s)
                next(worker for worker in reversed(self._workers) if not worker.is_leaving).is_leaving = True

    def _worker_seconds(self) -> float:
        return self._worker_s + self._num_workers * (self.now_s - self._worker_s_at)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _after(self, at_s: float, event: Callable[[], None]) -> None:
        heappush(self._queue, (at_s, next(self._order), event))

    def _announce(self, number: int) -> None:
        worker = self._workers[number]
        self._handle(
            Announce(worker=number, session=worker.session, first=worker.next_batch, until=worker.next_batch + 1)
        )

    def _on_grant(self, grant: Grant) -> None:
        worker = self._workers[grant.worker]
        at_s = self.now_s
        if worker.cached < grant.min_version:  # else it uses what it has, as a real worker does
            num_bytes: dict[int, int] = {}
            for sizes in self._sizes[worker.cached + 1 : grant.version + 1]:
                for source, size in sizes:
                    if source != grant.worker:
                        num_bytes[source] = num_bytes.get(source, 0) + size
            self.outcome.bytes_read += sum(num_bytes.values())
            version, weights = self._snapshot
            assert version == grant.version, "a grant names the newest version"
            worker.snapshot = (version, grant.included, weights)
            at_s = self._store.get(grant.worker, num_bytes, self.now_s)
        at_s += self._compute_s(grant.worker, grant.first)
        self._after(at_s, lambda: self._on_computed(grant))

    def _on_computed(self, grant: Grant) -> None:
        worker, number = self._workers[grant.worker], grant.worker
        if worker.snapshot is not None:
            worker.cached, included, weights = worker.snapshot
            worker.snapshot = None
            while worker.pushed and worker.pushed[0][0] < included:
                worker.pushed.popleft()
            worker.view[:] = weights
            for _, own in worker.pushed:
                worker.view += own
            worker.residual.add_to(worker.view)
        step = self._problem.step(worker.view, number, grant.first)
        values = step.values
        worker.view += values
        if worker.residual.is_used:
            worker.residual.split(values, worker.view, grant.first)
        worker.pushed.append((grant.first, values))
        batch = PushedBatch(
            batch=grant.first, grant_id=grant.grant_ids[0], n_samples=step.num_samples, loss_sum=step.loss_sum,
            version=worker.cached,
        )  # fmt: skip
        self._send(number, values, (batch,), holds_back=worker.residual.is_held)

    def _send(self, number: int, values: Vector, batches: tuple[PushedBatch, ...], **more: Any) -> None:
        worker = self._workers[number]
        parts = Compressor(_JOB, len(values)).compress(values, version=worker.cached)
        size = sum(memoryview(part).nbytes for part in parts)
        key = f"{number}/{next(self._order)}"
        self._blobs[key] = (values, size)
        self._values_sent += int(np.count_nonzero(values))
        self.outcome.num_batches += len(batches)
        self.outcome.bytes_sent += size
        push = Push(
            worker=number, session=worker.session, term=_TERM, version=worker.cached, key=key, batches=batches, **more
        )
        self._after(self._store.put(number, size, self.now_s), lambda: self._on_stored(push))

    def _on_stored(self, push: Push) -> None:
        number, worker = push.worker, self._workers[push.worker]
        self._handle(push)
        worker.next_batch += len(push.batches)
        if not worker.is_leaving:
            self._announce(number)
        elif push.batches and (held := worker.residual.of(worker.next_batch)) is not None:
            # A worker that leaves sends what it holds back first.
            worker.residual.clear()
            self._send(number, held, (), settles=worker.next_batch)
        else:
            self._leave(number)

    def _leave(self, number: int) -> None:
        worker = self._workers[number]
        self._worker_s, self._worker_s_at = self._worker_seconds(), self.now_s
        self._num_workers -= 1
        self._handle(Leave(worker=number, session=worker.session, cause="scale-in"))
