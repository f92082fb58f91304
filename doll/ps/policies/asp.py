"""Asynchronous parallel: every gradient is applied as it comes, whatever version it was computed at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from doll.ps.policies.base import BatchId, PolicyView


class Asp:
    """No waiting at all: one batch per worker under way, each gradient an update of its own."""

    name: ClassVar[str] = "asp"
    exact_version: ClassVar[bool] = False

    def start(self, view: PolicyView) -> Sequence[int]:
        return [worker for worker, state in view.workers() if state.waiting and not state.computing]

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches()[:1]
