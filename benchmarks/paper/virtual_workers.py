"""Virtual workers, synchronised in waves: pipelines that the production engine and policy `wsp` admit minibatches to.

Each virtual worker is a pipeline of stages (`doll.pipeline.planner.schedule`). Its next minibatch starts when the
pipeline has room for it, the policy has granted it, and the weights that it must have are there. Minibatches that are
complete are pushed by waves. Weights are pulled when a grant asks for newer ones, not before: so they are as old as the
policy lets them be. The HetPipe paper, section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappush

import msgspec
import numpy as np
from doll.pipeline.planner.schedule import Jitter, Pipeline, StageTimes
from doll.pipeline.planner.timeline import Timeline
from doll.ps.engine.events import ApplyUpdate, StopRequested
from doll.ps.policies import Policy
from doll.ps.policies.wsp import WspPolicyConfig
from doll.records.control import Grant, NewVersion, PushedBatch
from doll.simulation.randomness import blocks
from doll.simulation.settings import SimulationSettings
from doll.simulation.system import MESSAGE, System

# Numbers of messages: that of a stage whose task ends, or one of these.
_PUSHED, _PULLED, _DISPATCH = range(1 << 20, (1 << 20) + 3)
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


class VirtualWorkers(System):
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
        settings = SimulationSettings(
            rates_per_s=[1e-9] * workers, batch_size=1, policy=config, arrival_scv=0.0, random_phase=False,
            updates=1 << 40, checkpoint_every_updates=1 << 40,
        )  # fmt: skip
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
        self._pushes: list[deque[tuple[int, tuple[PushedBatch, ...]]]] = [deque() for _ in range(workers)]
        super().__init__(settings, policy=policy)
        self._cached = [0] * workers
        for worker in range(workers):
            self.complete[worker] = self.minibatches
            self._announce(worker)

    @property
    def waiting_share(self) -> list[float]:
        """Of each virtual worker: waiting for admission, of the time of the whole run."""
        return [seconds / self.now for seconds in self.waiting_s]

    def timeline(self, worker: int) -> Timeline:
        """What the stages of this virtual worker did."""
        pipeline = self.pipelines[worker]
        return Timeline(len(pipeline.stages), self.wave, tuple(pipeline.spans))

    # --- the virtual worker -------------------------------------------------------------------------------------------

    def _on_grant(self, grant: Grant) -> None:
        self._granted[grant.worker].append(grant)
        self._dispatch_later(grant.worker)

    def _on_offer(self, offer: NewVersion) -> None:
        """Weights are pulled, not sent."""

    def _dispatch_later(self, worker: int) -> None:
        """When all of this moment has happened."""
        if not self._is_dispatching[worker]:
            self._is_dispatching[worker] = True
            heappush(self._queue, (self.now, _LAST_OF_MOMENT, worker, _DISPATCH))

    def _dispatch(self, worker: int) -> None:
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
        if not self._granted[worker] or self._pulling[worker] is not None:
            return False
        grant = self._granted[worker][0]
        if self._cached[worker] < grant.min_version:
            if self._pull_s:
                self._pulling[worker] = self.engine.version
                heappush(self._queue, (self.now + self._pull_s, MESSAGE, worker, _PULLED))
                return False
            self._cached[worker] = self.engine.version
        return True

    def _start_next(self, worker: int) -> None:
        since_s = self._waits_since_s[worker]
        pipeline = self.pipelines[worker]
        if since_s is not None:
            self.waiting_s[worker] += self.now - since_s
            if not pipeline.busy:
                self.idle_s[worker] += self.now - max(since_s, self._idle_since_s[worker])
            self._waits_since_s[worker] = None
        minibatch = pipeline.start(self.now)
        before = minibatch - 1
        self.missing_own = max(self.missing_own, before - self._own[worker].length)
        if minibatch > self._free:
            has = self._contents[self._cached[worker]]
            oldest = min((has[other] for other in range(len(has)) if other != worker), default=before)
            self.missing = max(self.missing, before - oldest)
        granted = self._granted[worker]
        grant = granted[0]
        if len(grant.grant_ids) > 1:
            granted[0] = msgspec.structs.replace(grant, first=grant.first + 1, grant_ids=grant.grant_ids[1:])
        else:
            granted.popleft()
        self._done[worker].append(
            PushedBatch(
                batch=grant.first, grant_id=grant.grant_ids[0], n_samples=1, loss_sum=0.0, version=self._cached[worker]
            )
        )

    def _on_message(self, worker: int, number: int) -> None:
        if number == _DISPATCH:
            self._dispatch(worker)
        elif number == _PUSHED:
            session, wave = self._pushes[worker].popleft()
            self._send(session, worker, wave)
        elif number == _PULLED:
            version, self._pulling[worker] = self._pulling[worker], None
            assert version is not None
            self._cached[worker] = version
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
        done = self._done[worker]
        wave = tuple(done[: self.wave])
        del done[: self.wave]
        if self._push_s:
            self._pushes[worker].append((self._session[worker], wave))
            heappush(self._queue, (self.now + self._push_s, MESSAGE, worker, _PUSHED))
        else:
            self._send(self._session[worker], worker, wave)

    # --- the server ---------------------------------------------------------------------------------------------------

    def _on_update(self, update: ApplyUpdate) -> None:
        super()._on_update(update)
        for item in update.sets:
            worker, until = item.push.worker, item.push.batches[-1].batch + 1
            for minibatch in self._complete[worker][self._applied[worker] : until]:
                self._in_model[worker].add(minibatch)
            self._applied[worker] = until
        self._contents.append(tuple(prefix.length for prefix in self._in_model))
        self.distance = max(self.distance, (max(self._applied) - min(self._applied)) // self.wave)
        if min(self._applied) == self.minibatches and self.engine.stopping is None:
            self._handle(StopRequested(reason="waves"))
