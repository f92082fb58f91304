"""A simulated job whose workers read weights and send steps over a network: each message takes its time.

The setting of the ESSP paper. Workers have all their batches from the beginning, and one clock of a worker is one
batch. A worker computes a batch on the weights that it has, where the engine allows them, and asks nobody; else

- `asks`: it asks the server, which answers with the weights that it has when it grants the batch (SSP);
- `waits`: it waits for weights that the server sends (ESSP);
- `has`: it gets them in no time (VAP: the grant is checked, not the network).

Messages of one worker arrive in the order in which they were sent. Grants take no time: what a worker may do follows
from the weights that it has, and the paper's client finds that out by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from heapq import heappush
from typing import Literal, Protocol

import numpy as np
from doll.config.policy import PolicyConfig
from doll.ps.engine.events import (
    ApplyUpdate,
    EngineAction,
    Event,
    FetchGradient,
    GradientFetched,
    StopRequested,
)
from doll.ps.policies import Policy, make_policy
from doll.ps.policies.essp import Essp
from doll.ps.policies.ssp import BoundedStalenessConfig, Ssp
from doll.records.control import AnyRecord, Grant, NewVersion, Push
from doll.theory.staleness import Histogram, StalenessMeter

from doll_lab.simulation.randomness import Draw, blocks
from doll_lab.simulation.timed_world import MESSAGE, TimedProcess, TimedWorld

Read = Literal["asks", "waits", "has"]
# (worker, batch) -> seconds that its gradient takes
ComputeTime = Callable[[int, int], float]

_PUSH, _REQUEST, _WEIGHTS = range(3)  # numbers of messages


class _Asked(Enum):
    """Where a worker's request for weights is."""

    NO = 0
    ON_ITS_WAY = 1
    AT_SERVER = 2
    ANSWERED = 3


class Steps(Protocol):
    """What the steps of the batches are. Versions are published in order."""

    def publish(self, version: int) -> None:
        """The weights of now, of this version, are sent to a worker. Called once for each worker."""

    def compute(self, worker: int, batch: int, version: int) -> float:
        """`worker` begins to compute `batch` on these weights and its own steps that they do not hold.

        Returns:
            By how much the step moves any one number at most.
        """

    def apply(self, update: ApplyUpdate) -> None:
        """Add the steps of these batches."""


def policy_of(config: PolicyConfig) -> Policy:
    """The policy of the simulation: the live one. As many batches are under way as the clocks allow, as in the
    paper."""
    if isinstance(config, BoundedStalenessConfig):
        return (Essp if config.name == "essp" else Ssp)(config.staleness, config.staleness + 1)
    return make_policy(config)


def clock_times(rng: np.random.Generator, shape: float = 20.0, doubled: float = 0.05) -> ComputeTime:
    """Seconds of a clock: Gamma(shape, 1 / shape), and twice that for a share of the clocks, whichever the worker.

    With the defaults 1.05 s on average.
    """
    draw = blocks(lambda size: rng.standard_gamma(shape, size) / shape * (1.0 + (rng.random(size) < doubled)))
    return lambda worker, batch: draw()


class NetworkedSystem(TimedWorld):
    """P workers, one server, and a network.

    Attributes:
        blocked_s: of each worker, the seconds in which it waited for weights or for others, until its batch `clocks`.
        computing_s: of each worker, until then.
        histogram: staleness of every read behind the first `warm_up` batches of a worker.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        workers: int,
        clocks: int,
        compute: ComputeTime,
        latency_s: float,
        read: Read,
        seed: int,
        steps: Steps | None = None,
        policy: Policy | None = None,
        warm_up: int = 0,
    ) -> None:
        """
        Args:
            clocks: the run ends when so many batches of every worker are in the model.
            latency_s: mean seconds of a message, exponential.
            policy: in place of the one that `config` names.
        """
        super().__init__(
            config, num_workers=workers, seconds_of=self._computing, on={MESSAGE: self._on_message},
            policy=policy or policy_of(config),
        )  # fmt: skip
        self._clocks = clocks
        self._seconds = compute
        self._read_by: Read = read
        self._steps = steps
        rng = np.random.default_rng((seed, 2))
        self._latency: Draw = blocks(lambda size: rng.standard_exponential(size) * latency_s)
        self._wants_since_s: list[float | None] = [0.0] * workers
        self._asked = [_Asked.NO] * workers
        # Records of each worker's messages: to the server, and from it.
        self._on_their_way: list[tuple[deque[Push], deque[NewVersion]]] = [(deque(), deque()) for _ in range(workers)]
        self._last_arrival_s = [[0.0, 0.0] for _ in range(workers)]  # to the server, and from it
        self._max_changes: dict[str, float] = {}
        self._is_behind = set(range(workers))  # workers with fewer batches in the model
        self._meter = StalenessMeter([0] * workers, warm_up=warm_up, all_up_to=workers)
        self.histogram: Histogram = self._meter.histogram
        self.blocked_s = [0.0] * workers
        self.computing_s = [0.0] * workers
        if steps is not None:
            steps.publish(0)
        for worker in range(workers):
            self.start_process(worker).cached = 0
        # Twice what is needed: nobody runs out of batches before the slowest is through.
        for worker in range(workers):
            self._read(worker, 2 * clocks + 1_000)

    def run(self) -> None:
        """Run until every worker has its clocks."""
        self.run_until()

    @property
    def blocked_share(self) -> float:
        """Of the workers' time."""
        blocked = sum(self.blocked_s)
        return blocked / (blocked + sum(self.computing_s))

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _go_on(self, process: TimedProcess) -> None:
        if process.orders and not process.is_computing:
            self._want(process)

    def _on_computed(self, worker: int, number: int) -> None:
        super()._on_computed(worker, number)
        process = self.process(worker)
        if not process.is_computing and not process.orders:
            self._want(process)

    def _want(self, process: TimedProcess) -> None:
        """The next batch is wanted, from now on or still."""
        if self._wants_since_s[process.worker] is None:
            self._wants_since_s[process.worker] = self.now
        self._try(process)

    def _try(self, process: TimedProcess) -> None:
        """Compute the batch that is wanted, if there is one and the weights are new enough."""
        worker = process.worker
        since_s = self._wants_since_s[worker]
        if since_s is None:
            return
        grant = process.first_order.grant if process.orders else None
        if grant is not None and self._read_by == "has" and process.cached < grant.min_version:
            self._publish(grant.version)
            process.cached = grant.version
        if grant is None or process.cached < grant.min_version:
            if self._read_by == "asks" and self._asked[worker] is _Asked.NO:
                self._asked[worker] = _Asked.ON_ITS_WAY
                self._message(worker, _REQUEST)
            return
        self._wants_since_s[worker] = None
        if grant.first < self._clocks:
            self.blocked_s[worker] += self.now - since_s
        self._meter.read(worker, process.cached, grant.first)
        if self._steps is not None:
            key = self._key_of(worker, grant.first)
            self._max_changes[key] = self._steps.compute(worker, grant.first, process.cached)
        self._begin(process)

    def _key_of(self, worker: int, batch: int) -> str:
        return "" if self._steps is None else f"{worker}.{batch}"

    def _computing(self, worker: int, batch: int) -> float:
        seconds = self._seconds(worker, batch)
        if batch < self._clocks:
            self.computing_s[worker] += seconds
        return seconds

    # --- the network --------------------------------------------------------------------------------------------------

    def _message(self, worker: int, kind: int) -> None:
        """A message from or to a worker."""
        last, way = self._last_arrival_s[worker], int(kind == _WEIGHTS)
        last[way] = max(last[way], self.now + self._latency())
        heappush(self._queue, (last[way], MESSAGE, worker, kind))

    def to_server(self, process: TimedProcess, record: AnyRecord) -> None:
        if isinstance(record, Push):
            self._on_their_way[process.worker][0].append(record)
            self._message(process.worker, _PUSH)
        else:
            super().to_server(process, record)

    def to_worker(self, worker: int, record: AnyRecord) -> None:
        if isinstance(record, NewVersion):
            self._publish(record.version)
            self._on_their_way[worker][1].append(record)
            self._message(worker, _WEIGHTS)
            return
        if isinstance(record, Grant) and self._asked[worker] is _Asked.AT_SERVER:
            self._answer(worker, record.version)
        super().to_worker(worker, record)

    def _answer(self, worker: int, version: int) -> None:
        self._asked[worker] = _Asked.ANSWERED
        self.to_worker(worker, NewVersion(term=self.term, worker=worker, version=version, key=""))

    def _on_message(self, worker: int, number: int) -> None:
        to_server, to_worker = self._on_their_way[worker]
        process = self.process(worker)
        if number == _PUSH:
            self.handle(to_server.popleft())
            if not self._is_behind and self.engine.stopping is None:
                self.handle(StopRequested(reason="clocks"))
        elif number == _REQUEST:
            if process.orders:
                self._answer(worker, self.engine.version)
            else:
                self._asked[worker] = _Asked.AT_SERVER
        else:
            if self._asked[worker] is _Asked.ANSWERED:
                self._asked[worker] = _Asked.NO
            self.receive(process, to_worker.popleft())
            process.cached = max(process.cached, process.offered)
            self._try(process)

    # --- the server ---------------------------------------------------------------------------------------------------

    def _publish(self, version: int) -> None:
        if self._steps is not None:
            self._steps.publish(version)

    def perform(self, action: EngineAction) -> Event | None:
        if isinstance(action, FetchGradient):
            return GradientFetched(grant_id=action.grant_id, max_change=self._max_changes.pop(action.key))
        if isinstance(action, ApplyUpdate):
            self._on_update(action)
        return super().perform(action)

    def _on_update(self, update: ApplyUpdate) -> None:
        if self._steps is not None:
            self._steps.apply(update)
        for item in update.sets:
            worker, batches = item.push.worker, item.push.batches[-1].batch + 1
            self._meter.applied(worker, update.version, batches)
            if batches >= self._clocks:
                self._is_behind.discard(worker)
