"""Bulk synchronous parallel: each update is one gradient of every live worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from doll.config.policy import PolicyConfig
from doll.ps.policies.base import BatchId, PolicySpec, PolicyView


class BspPolicyConfig(PolicyConfig):
    """Bulk synchronous: one batch of every live worker per update."""

    name: Literal["bsp"] = "bsp"

    def batches_per_update(self, num_workers: int) -> int:
        return num_workers

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        """The slowest stream sets the pace.

        >>> BspPolicyConfig().update_rate_per_s([100.0, 50.0], batch_size=10)
        5.0
        """
        return min(rates_per_s, default=0.0) / batch_size


class Bsp:
    """One batch of every live worker per round.

    A worker that goes down leaves the round; the gradient that it pushed before stays in it (digest 5.4, pitfall 6).
    """

    name: ClassVar[str] = "bsp"
    exact_version: ClassVar[bool] = True

    def start(self, view: PolicyView) -> Sequence[int]:
        return [worker for worker, state in view.workers() if state.waiting and not state.held and not state.computing]

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        if view.num_held == 0 or view.num_computing:
            return ()
        if all(state.held for _, state in view.workers() if state.is_live):
            return view.held_batches()
        return ()


SPEC = PolicySpec("bsp", BspPolicyConfig, lambda config: Bsp(), exact_version=True)
