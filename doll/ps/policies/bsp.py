"""Bulk synchronous parallel: each update is one gradient of every live worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from doll.ps.policies.base import BatchId, PolicyView


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
