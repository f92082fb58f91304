"""Virtual workers, synchronised in waves: pipelines that the production engine and policy `wsp` admit minibatches to.

Each virtual worker is a pipeline of stages (`doll_lab.pipelines.schedule`). Its next minibatch starts when the
pipeline has room for it, the policy has granted it, and the weights that it must have are there. Minibatches that are
complete are pushed by waves. Weights are pulled when a grant asks for newer ones, not before: so they are as old as the
policy lets them be. The HetPipe paper, section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappush

import numpy as np
from doll.consumers.protocol.worker_core import Compute, ComputedBatch, GradientDone
from doll.ps.engine.events import ApplyUpdate, EngineAction, Event, StopRequested
from doll.ps.policies import Policy
from doll.ps.policies.wsp import WspPolicyConfig
from doll.records.control import AnyRecord, Push

from doll_lab.pipelines.schedule import Jitter, Pipeline, StageTimes
from doll_lab.pipelines.timeline import Timeline
from doll_lab.simulation.randomness import blocks
from doll_lab.simulation.timed_world import MESSAGE, TimedProcess, TimedWorld

# Numbers of messages: that of a stage whose task ends, or one of these.
_PUSHED, _PULLED = 1 << 20, (1 << 20) + 1
_LAST_OF_MOMENT = MESSAGE + 1


def lognormal_jitter(rng: np.random.Generator, sigma: float) -> Jitter:
    """Factors on the times of tasks, independent, with median 1."""
    draw = blocks(lambda size: np.exp(sigma * rng.standard_normal(size)))
    return lambda stage, kind, minibatch: draw()


class _Prefix:
    """How many of the minibatches 1, 2, ... are there without a gap."""

    def __init__(self) -> None:
        self.length = 0
        self._later: set[int] = set()

    def add(self, minibatch: int) -> None:
        self._later.add(minibatch)
        while self.length + 1 in self._later:
            self.length += 1
            self._later.discard(self.length)


class VirtualWorkers(TimedWorld):
    """N virtual workers and one server.

    Attributes:
        pipelines: of each virtual worker, with the spans of its tasks.
        waiting_s: of each, the seconds in which its pipeline had room and the next minibatch was not admitted.
        idle_s: of each, those of `waiting_s` in which no stage had anything to do.
        completions_s: of each, when its minibatches were complete.
        missing: the most updates of another virtual worker that a minibatch p was computed without, of those of
            minibatches before p; only of p > (D + 1) N_m + s_local, behind which `s_global` is the bound.
        missing_own: as `missing`, of its own virtual worker, of any p; the bound is s_local.
        distance: the most waves of one virtual worker in the model that another one was behind.
    """

    def __init__(
        self,
        config: WspPolicyConfig,
        stages: Sequence[Sequence[StageTimes]],
        *,
        waves: int,
        jitter: Callable[[int], Jitter | None] = lambda worker: None,
        push_s: float = 0.0,
        pull_s: float = 0.0,
        policy: Policy | None = None,
        pipeline: type[Pipeline] = Pipeline,
    ) -> None:
        """
        Args:
            config: N_m and D.
            stages: those of each virtual worker.
            waves: that each virtual worker computes; then it stops.
            jitter: for each virtual worker; default: none.
            push_s: seconds that a wave's updates take to the server.
            pull_s: seconds that weights take to a virtual worker.
            policy: in place of the one that `config` names.
            pipeline: another rule of scheduling.
        """
        config = config.model_copy(update={"pipelined": True})
        workers = len(stages)
        super().__init__(
            config, num_workers=workers, on={MESSAGE: self._on_message, _LAST_OF_MOMENT: self._dispatch}, policy=policy
        )
        self.wave = config.wave_batches
        self.minibatches = waves * self.wave
        self._free = (config.clock_distance + 1) * self.wave + self.wave - 1  # minibatches without a bound
        self.pipelines = [pipeline(stages[worker], self.wave, jitter=jitter(worker)) for worker in range(workers)]
        self.waiting_s = [0.0] * workers
        self.idle_s = [0.0] * workers
        self.completions_s: list[list[float]] = [[] for _ in range(workers)]
        self.missing = self.missing_own = self.distance = 0
        self._push_s, self._pull_s = push_s, pull_s
        self._waits_since_s: list[float | None] = [None] * workers
        self._idle_since_s = [0.0] * workers  # since when no stage is busy, where none is
        self._pulling: list[int | None] = [None] * workers  # the version on its way
        self._is_dispatching = [False] * workers  # at this moment
        # In order of completion. They are pushed under the numbers of the next batches of the stream: the same ones, as
        # long as minibatches are complete in order.
        self._complete: list[list[int]] = [[] for _ in range(workers)]
        self._own = [_Prefix() for _ in range(workers)]
        self._in_model = [_Prefix() for _ in range(workers)]
        self._applied = [0] * workers
        self._contents: list[tuple[int, ...]] = [(0,) * workers]  # of each version, without gaps
        self._pushes: list[deque[Push]] = [deque() for _ in range(workers)]
        # Of each worker, in order: what it computes, with the version of its weights; what is pushed is taken out.
        self._started: list[list[tuple[Compute, int]]] = [[] for _ in range(workers)]
        for worker in range(workers):
            self.start_process(worker).cached = 0
        for worker in range(workers):
            self._read(worker, self.minibatches)

    def run(self) -> None:
        """Run until every virtual worker has computed its waves."""
        self.run_until()

    @property
    def waiting_share(self) -> list[float]:
        """Of each virtual worker: waiting for admission, of the time of the whole run."""
        return [seconds / self.now for seconds in self.waiting_s]

    def timeline(self, worker: int) -> Timeline:
        """What the stages of this virtual worker did."""
        pipeline = self.pipelines[worker]
        return Timeline(len(pipeline.stages), self.wave, tuple(pipeline.spans))

    # --- the virtual worker -------------------------------------------------------------------------------------------

    def _go_on(self, process: TimedProcess) -> None:
        self._dispatch_later(process.worker)

    def _dispatch_later(self, worker: int) -> None:
        """When all of this moment has happened."""
        if not self._is_dispatching[worker]:
            self._is_dispatching[worker] = True
            heappush(self._queue, (self.now, _LAST_OF_MOMENT, worker, 0))

    def _dispatch(self, worker: int, number: int) -> None:
        self._is_dispatching[worker] = False
        pipeline = self.pipelines[worker]
        while pipeline.has_room and pipeline.started < self.minibatches:
            if not self._may_start(worker):
                if self._waits_since_s[worker] is None:
                    self._waits_since_s[worker] = self.now
                break
            self._start_next(worker)
        for end_s, stage in pipeline.dispatch(self.now):
            heappush(self._queue, (end_s, MESSAGE, worker, stage))

    def _may_start(self, worker: int) -> bool:
        """The next minibatch is granted, and the weights are new enough; else they are pulled."""
        process = self.process(worker)
        if not process.orders or self._pulling[worker] is not None:
            return False
        if process.cached < process.first_order.grant.min_version:
            if self._pull_s:
                self._pulling[worker] = self.engine.version
                heappush(self._queue, (self.now + self._pull_s, MESSAGE, worker, _PULLED))
                return False
            process.cached = self.engine.version
        return True

    def _start_next(self, worker: int) -> None:
        since_s = self._waits_since_s[worker]
        pipeline, process = self.pipelines[worker], self.process(worker)
        if since_s is not None:
            self.waiting_s[worker] += self.now - since_s
            if not pipeline.busy:
                self.idle_s[worker] += self.now - max(since_s, self._idle_since_s[worker])
            self._waits_since_s[worker] = None
        minibatch = pipeline.start(self.now)
        before = minibatch - 1
        self.missing_own = max(self.missing_own, before - self._own[worker].length)
        if minibatch > self._free:
            has = self._contents[process.cached]
            oldest = min((has[other] for other in range(len(has)) if other != worker), default=before)
            self.missing = max(self.missing, before - oldest)
        self._started[worker].append((process.take(1), process.cached))

    def _on_message(self, worker: int, number: int) -> None:
        if number == _PUSHED:
            self.handle(self._pushes[worker].popleft())
        elif number == _PULLED:
            version, self._pulling[worker] = self._pulling[worker], None
            assert version is not None
            self.process(worker).cached = version
            self._dispatch_later(worker)
        else:
            minibatch = self.pipelines[worker].end(number, self.now)
            if not self.pipelines[worker].busy:
                self._idle_since_s[worker] = self.now
            self._dispatch_later(worker)
            if minibatch is not None:
                self._on_complete(worker, minibatch)

    def _on_complete(self, worker: int, minibatch: int) -> None:
        self.completions_s[worker].append(self.now)
        self._own[worker].add(minibatch)
        self._complete[worker].append(minibatch)
        if len(self._complete[worker]) % self.wave:
            return
        wave, self._started[worker] = self._started[worker][: self.wave], self._started[worker][self.wave :]
        holds = tuple((order.grant.first, order.grant.grant_ids[0]) for order, _ in wave)
        process = self.process(worker)
        for at, (order, version) in enumerate(wave):
            is_kept = at + 1 < self.wave
            computed = (ComputedBatch(1, version=version),)
            done = GradientDone("", version, computed, is_kept=is_kept, holds=() if is_kept else holds)
            self.do(process, process.protocol.gradient_done(order.grant, order.batches, done, self.now))

    def to_server(self, process: TimedProcess, record: AnyRecord) -> None:
        if isinstance(record, Push) and self._push_s:
            self._pushes[process.worker].append(record)
            heappush(self._queue, (self.now + self._push_s, MESSAGE, process.worker, _PUSHED))
        else:
            super().to_server(process, record)

    # --- the server ---------------------------------------------------------------------------------------------------

    def perform(self, action: EngineAction) -> Event | None:
        if isinstance(action, ApplyUpdate):
            self._on_update(action)
        return super().perform(action)

    def _on_update(self, update: ApplyUpdate) -> None:
        for item in update.sets:
            worker, until = item.push.worker, item.push.batches[-1].batch + 1
            for minibatch in self._complete[worker][self._applied[worker] : until]:
                self._in_model[worker].add(minibatch)
            self._applied[worker] = until
        self._contents.append(tuple(prefix.length for prefix in self._in_model))
        self.distance = max(self.distance, (max(self._applied) - min(self._applied)) // self.wave)
        if min(self._applied) == self.minibatches and self.engine.stopping is None:
            self.handle(StopRequested(reason="waves"))
