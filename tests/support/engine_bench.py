"""The engine with its policy, event by event, for tests of single rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.base import Policy
from doll.records.control import (
    Grant,
    Join,
    Welcome,
)
from engine_invariants import check_engine
from pushes import push_of
from record_builders import announce

T = TypeVar("T")


LEASE_S = 8.0


TIMEOUT_S = 30.0


def settings(workers: int = 3, **changes: object) -> EngineSettings:
    values: dict[str, object] = {
        "num_workers": workers, "records_per_batch": 4, "max_pending_batches": 8, "lease_s": LEASE_S,
        "grant_timeout_s": TIMEOUT_S, "checkpoint_every_updates": 1000, "checkpoint_every_s": 1000.0,
    }  # fmt: skip
    return EngineSettings(**{**values, **changes})  # type: ignore[arg-type]


class Granted(NamedTuple):
    """One batch of a Grant."""

    grant_id: int
    version: int
    min_version: int


class Bench:
    """An engine whose workers are moved by hand; gradients arrive unless a test says otherwise."""

    def __init__(self, policy: Policy, workers: int = 3, **changes: object) -> None:
        self.now = 0.0
        self.engine = Engine(
            settings(workers, **changes), policy, term=1, now=0.0, origins=[100 * n for n in range(workers)]
        )
        self.sessions: dict[int, int] = {}
        self.grants: dict[tuple[int, int], Granted] = {}

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, self.now)
        check_engine(self.engine)
        for action in actions:
            if isinstance(action, Grant):
                for batch, number in enumerate(action.grant_ids, action.first):
                    self.grants[action.worker, batch] = Granted(number, action.version, action.min_version)
        return actions

    def join(self, *workers: int) -> None:
        for worker in workers:
            (welcome,) = only(self.handle(Join(worker=worker, process=f"w{worker}")), Welcome)
            self.sessions[worker] = welcome.session

    def announce(self, worker: int, first: int, until: int) -> list[ev.EngineAction]:
        return self.handle(announce(worker, self.sessions[worker], first, until))

    def push(self, worker: int, batch: int, **changes: object) -> list[ev.EngineAction]:
        grant = self.grants[worker, batch]
        values: dict[str, object] = {
            "worker": worker, "session": self.sessions[worker], "batch": batch, "term": 1, "grant_id": grant.grant_id,
            "version": grant.version, "key": f"g{grant.grant_id}", "n_samples": 4, "loss_sum": 4.0,
        }  # fmt: skip
        actions = self.handle(push_of(**{**values, **changes}))  # type: ignore[arg-type]
        for fetch in only(actions, ev.FetchGradient):
            actions = actions + self.handle(ev.GradientFetched(grant_id=fetch.grant_id))
        return actions


def only(actions: Sequence[ev.EngineAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def granted(actions: Sequence[ev.EngineAction]) -> list[tuple[int, int]]:
    """(worker, batch) in the order in which they were granted."""
    grants = [
        (number, action.worker, batch)
        for action in only(actions, Grant)
        for batch, number in enumerate(action.grant_ids, action.first)
    ]
    return [(worker, batch) for _, worker, batch in sorted(grants)]


def applied(update: ev.ApplyUpdate) -> list[tuple[int, int]]:
    """(worker, batch) in the order of the update's members."""
    return [(item.push.worker, batch.pushed.batch) for item in update.sets for batch in item.batches]
