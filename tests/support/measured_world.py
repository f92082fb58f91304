"""A world that measures its policy as the server does, and counts each read a second time by the definition alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from doll.config.policy import PolicyConfig
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.measures import PolicyMeasures
from doll.ps.policies.base import Policy, PolicyView
from doll.ps.policies.gated import GatedConfig
from doll.records.control import Welcome
from doll.theory.staleness import bucket
from engine_world import used_version
from holey_world import HoleyWorld


class MeasuredWorld(HoleyWorld):
    """Keeps the clocks of all workers at all versions of the term, made from the engine's counters alone.

    Attributes:
        expected: how often each difference was due; `older`: how many were of versions from before the term.
        num_reads: of all terms; `num_raised`: how often a worker's clock was raised, as nobody waits for it.
    """

    def __init__(self, policy: PolicyConfig, **world: Any) -> None:
        self.num_reads = self.num_raised = 0
        self._kept: tuple[int, list[int]] = (0, [])
        self._of_orders: dict[int, tuple[int, list[int]]] = {}
        super().__init__(policy, max_pending=12, **world)

    # --- clocks, counted apart --------------------------------------------------------------------------------------

    def make_policy(self) -> Policy:
        """The policy, with a look at the engine whenever the policy looks at it."""
        policy = super().make_policy()
        changed, skipped = policy.changed, policy.skipped

        def changed_and_noted(view: PolicyView, workers: Collection[int]) -> None:
            changed(view, workers)
            self._note(view)  # type: ignore[arg-type]

        def skipped_and_noted(worker: int, batches: int) -> None:
            skipped(worker, batches)
            self._offsets[worker] -= batches // self._unit * self._unit if self._is_gated else batches

        policy.changed, policy.skipped = changed_and_noted, skipped_and_noted  # type: ignore[method-assign]
        num_workers = self.settings.num_workers
        self._is_gated = isinstance(self.policy, GatedConfig)
        self._unit = self.policy.batches_per_push
        self._minimum, self._offsets = self._kept[0], list(self._kept[1] or [0] * num_workers)  # both in batches
        self._active: set[int] = set()
        self._clocks: dict[int, list[int]] = {}  # of each version
        self._minima: dict[int, int] = {}
        self._welcomed: dict[int, int] = {}
        self._measures: PolicyMeasures | None = None
        self.expected: Counter[int] = Counter()
        self.older = 0
        return policy

    def _note(self, engine: Engine) -> None:
        if self._is_gated:
            for worker in engine.workers():
                under_way = len(worker.queue.held_grants) + len(worker.queue.computing_grants)
                needed = 1 if worker.is_done else self._unit - worker.applied % self._unit
                is_active = worker.is_live and (under_way > 0 or len(worker.queue.waiting) >= needed)
                missed = self._minimum - self._whole(worker.number, engine)
                if is_active and worker.number not in self._active and missed > 0:
                    self._offsets[worker.number] += missed
                    self.num_raised += 1
                (self._active.add if is_active else self._active.discard)(worker.number)
            self._minimum = max(self._minimum, min((self._whole(n, engine) for n in self._active), default=0))
        self._minima[engine.version] = self._minimum
        self._clocks[engine.version] = [
            worker.applied + offset for worker, offset in zip(engine.workers(), self._offsets, strict=True)
        ]

    def _whole(self, worker: int, engine: Engine) -> int:
        """The clock of a worker's whole pushes in the model, in batches."""
        return engine.worker(worker).applied // self._unit * self._unit + self._offsets[worker]

    def _joined(self, worker: int) -> None:
        """Without clocks in the policy: it begins where the last of the others is, and nobody lacks what it missed."""
        clocks = self._clocks[self._reported]
        least = min((at for n, at in enumerate(clocks) if n != worker and self.engine.worker(n).is_live), default=0)
        if (missed := least - clocks[worker]) > 0:
            self.num_raised += 1
            self._offsets[worker] += missed
            for of_version in self._clocks.values():
                of_version[worker] = least

    # --- what the server measures -----------------------------------------------------------------------------------

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if self._measures is None:
            self._measures = PolicyMeasures(self.engine)
            self._start = self._reported = self.engine.start.version
        match action:
            case Welcome(worker=worker, session=session) if self._welcomed.get(worker) != session:
                self._welcomed[worker] = session
                if not self._is_gated and self.engine.version:
                    self._joined(worker)
                self._measures.joined(worker)
            case ev.ApplyUpdate():
                self._expect(action)
                self._measures.applied(action)
                self._reported = action.version
            case ev.StoreCheckpoint():
                self._of_orders[action.version] = (self._minimum, list(self._offsets))
        return super().perform(action)

    def _expect(self, update: ev.ApplyUpdate) -> None:
        clocks = list(self._clocks[update.version - 1])
        for item in update.sets:
            reader = item.push.worker
            for batch in item.push.batches if item.push.key else ():
                version = used_version(item.push, batch)
                others = [n for n in range(len(clocks)) if n != reader and self.engine.worker(n).is_live]
                self.num_reads += bool(others)
                if version < self._start:
                    self.older += len(others)
                else:
                    least = self._minima[version]
                    self.expected.update(
                        bucket(max(self._clocks[version][n], least) - 1 - clocks[reader]) for n in others
                    )
                clocks[reader] += 1

    def check_measures(self) -> None:
        if self._measures is not None:
            report = self._measures.report()
            assert report.staleness == self.expected
            assert report.older_reads == self.older

    def start_server(self) -> None:
        if self.term:
            self.check_measures()
        super().start_server()

    def store_checkpoint(self) -> None:
        version = self.saving[0].version if self.saving and self.is_serving else None
        super().store_checkpoint()
        if version is not None and self._is_gated is not False:
            self._kept = self._of_orders[version]
