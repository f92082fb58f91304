"""Worlds that check a policy against clocks which are counted apart, from the engine's counters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from doll.config.policy import PolicyConfig
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.membership import Worker
from doll.ps.policies.base import Policy
from doll.records.control import Grant
from engine_world import World


def announce(world: World, *workers: int) -> None:
    """Let these workers' processes announce what they can read, and compute nothing."""
    for process in [process for process in world.live() if process.worker in workers]:
        for _ in range(world.settings.max_pending_batches + 2):
            for step in (world.send, world.read):
                step(process)


def drive(world: World, rounds: int, *workers: int) -> None:
    """Let these workers' processes do all they can."""
    for _ in range(rounds):
        for process in [process for process in world.live() if process.worker in workers]:
            for step in (world.send, world.receive_next, world.read, world.compute):
                step(process)


class RecordedWorld(World):
    """Keeps what the engine orders, except checkpoints, which name the policy."""

    def __init__(self, policy: PolicyConfig, make: Callable[[], Policy] | None = None, **world: Any) -> None:
        self.actions: list[ev.EngineAction] = []
        self._make = make
        super().__init__(policy, **world)

    def make_policy(self) -> Policy:
        return super().make_policy() if self._make is None else self._make()

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if not isinstance(action, ev.StoreCheckpoint):
            self.actions.append(action)
        return super().perform(action)


class ClockWorld(World):
    """Counts each worker's clock, one for `unit` batches in the model, with the offset of what it has missed while it
    was away, or had no `unit` of batches.

    Attributes:
        grants, waited: grants that were checked; events after which a worker waited at the gate.
    """

    def __init__(
        self, policy: PolicyConfig, make: Callable[[], Policy] | None = None, *, unit: int = 1, max_pending: int = 6
    ) -> None:
        self.unit = unit
        self._make = make
        self.minimum = 0
        self.offsets: dict[int, int] = {}
        self._active: set[int] = set()
        self._held_by: dict[tuple[int, int], list[int]] = {}  # (term, version) -> batches of each worker in it
        self._kept: tuple[int, dict[int, int]] = (0, {})  # minimum and offsets of the stored checkpoint
        self._of_orders: dict[int, tuple[int, dict[int, int]]] = {}
        self.grants = self.waited = 0
        super().__init__(policy, max_pending=max_pending)

    def check(self, engine: Engine, grant: Grant, seen: list[int] | None) -> None:
        """Assert what must hold for a grant; `seen`: batches of each worker in the oldest version that it allows."""
        raise NotImplementedError

    def is_active(self, worker: Worker) -> bool:
        """Whether the others wait for it: it computes, or has what it needs to begin."""
        under_way = len(worker.queue.held_grants) + len(worker.queue.computing_grants)
        needed = 1 if worker.is_done else self.unit - worker.applied % self.unit
        has_next = len(worker.queue.waiting) >= needed
        return worker.is_live and (under_way > 0 or has_next)

    def offset(self, number: int) -> int:
        return self.offsets.get(number, 0)

    def make_policy(self) -> Policy:
        self.minimum, self.offsets = self._kept[0], dict(self._kept[1])
        self._active = set()
        return super().make_policy() if self._make is None else self._make()

    def handle(self, event: ev.Event) -> None:
        super().handle(event)
        if self.is_serving:
            self._count(self.engine)
            self.waited += any(worker.waiting and not worker.computing for worker in self.engine.workers())

    def _count(self, engine: Engine) -> None:
        for worker in engine.workers():
            number = worker.number
            is_active = self.is_active(worker)
            if is_active and number not in self._active:
                behind = self.minimum - worker.applied // self.unit - self.offset(number)
                self.offsets[number] = self.offset(number) + max(behind, 0)
            (self._active.add if is_active else self._active.discard)(number)
        if self._active:
            clocks = (engine.worker(number).applied // self.unit + self.offset(number) for number in self._active)
            self.minimum = max(self.minimum, min(clocks))

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        engine = self.engine
        self._count(engine)
        self._held_by.setdefault((self.term, engine.version), [worker.applied for worker in engine.workers()])
        if isinstance(action, ev.StoreCheckpoint):
            self._of_orders[action.version] = (self.minimum, dict(self.offsets))
        elif isinstance(action, Grant):
            self.grants += 1
            self.check(engine, action, self._held_by.get((self.term, action.min_version)))
        return super().perform(action)

    def store_checkpoint(self) -> None:
        version = self.saving[0].version if self.saving and self.is_serving else None
        super().store_checkpoint()
        if version is not None:
            self._kept = self._of_orders[version]
