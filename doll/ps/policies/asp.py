"""Asynchronous parallel: every gradient is applied when it comes, whatever version it was computed at."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from doll.config.policy import ParallelConfig
from doll.ps.policies.base import BatchId, Policy, PolicySpec, PolicyView, PooledConfig


class AsynchronousConfig(PooledConfig, ParallelConfig):
    """The common options of asp and vap."""

    def batches_per_update(self, num_workers: int) -> int:
        return 1


class AspPolicyConfig(AsynchronousConfig):
    """Asynchronous: every gradient is applied when it comes."""

    name: Literal["asp"] = "asp"
    contribution: Literal["gradient", "step"] = Field(
        default="gradient",
        description="what workers send: gradients, and the server runs the optimizer; or the steps of their own "
        "optimizers, which the server adds",
    )

    @property
    def sends_steps(self) -> bool:
        return self.contribution == "step"


class Asp(Policy):
    """The policy without waiting: one batch per worker is under way, and each gradient is an update of its own."""

    name: ClassVar[str] = "asp"
    exact_version: ClassVar[bool] = False

    def __init__(self) -> None:
        self._idle: set[int] = set()  # workers with a waiting batch that compute nothing

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            (self._idle.add if worker.waiting and not worker.computing else self._idle.discard)(number)

    def start(self, view: PolicyView) -> Sequence[int]:
        if not self._idle:
            return ()
        # A new set is made, because a set that was large keeps its memory, and a loop over it would stay slow.
        idle, self._idle = self._idle, set()
        return sorted(idle)

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches()[:1] if view.num_held else ()


SPEC = PolicySpec("asp", AspPolicyConfig, lambda config: Asp())
