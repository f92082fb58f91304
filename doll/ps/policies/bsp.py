"""Bulk synchronous parallel: each update consists of one gradient of every live worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from doll.config.policy import ParallelConfig
from doll.ps.policies.base import BatchId, Offer, Policy, PolicySpec, PolicyView


class LockstepConfig(ParallelConfig):
    """The common options of bsp and isp."""

    @property
    def serial_updates(self) -> bool:
        return True

    def batches_per_update(self, num_workers: int) -> int:
        return num_workers

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        """Return the update rate, which the slowest stream determines.

        >>> BspPolicyConfig().update_rate_per_s([100.0, 50.0], batch_size=10)
        5.0
        """
        return min(rates_per_s, default=0.0) / batch_size

    def shortfall_text(self, missing: int, *, live: int, workers: int, max_pending_batches: int) -> str:
        if not live:
            return super().shortfall_text(missing, live=live, workers=workers, max_pending_batches=max_pending_batches)
        return (
            f"no update can be made: policy {self.name} needs a batch of every live worker, and {missing} of {live} "
            "give none (no gradient within worker.grant_timeout_s, or a stream without records while the others are "
            "full); restart these workers, check that their streams get records, or choose another policy"
        )


class BspPolicyConfig(LockstepConfig):
    """Bulk synchronous: one batch of every live worker per update."""

    name: Literal["bsp"] = "bsp"
    contribution: Literal["gradient", "step"] = Field(
        default="gradient",
        description="what workers send: gradients, and the server runs the optimizer; or the steps of their own "
        "optimizers, which the server adds",
    )

    @property
    def sends_steps(self) -> bool:
        return self.contribution == "step"

    @property
    def averages_workers(self) -> bool:
        return self.sends_steps and super().averages_workers

    @model_validator(mode="after")
    def _has_steps_to_add(self) -> Self:
        if self.contributions == "sum" and not self.sends_steps:
            raise ValueError(
                "contributions: expected mean with contribution: gradient, because an update is one step on the mean "
                "gradient of its batches; got sum: set contribution: step, or training.reduction: sum"
            )
        return self


class Bsp(Policy):
    """Rounds of one batch of every live worker.

    A worker that is lost leaves the round. If it has pushed its gradient before, the gradient stays in the round.
    """

    name: ClassVar[str] = "bsp"
    exact_version: ClassVar[bool] = True

    def __init__(self) -> None:
        self._absent: set[int] = set()  # live workers without a held gradient that may still deliver one
        self._idle: set[int] = set()  # workers that have a waiting batch, and no batch in the round

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            is_absent = worker.is_live and not worker.held and not worker.is_spent
            (self._absent.add if is_absent else self._absent.discard)(number)
            idle = worker.waiting and not worker.held and not worker.computing
            (self._idle.add if idle else self._idle.discard)(number)

    def start(self, view: PolicyView) -> Sequence[int]:
        if not self._idle:
            return ()
        # A new set is made, because a set that was large keeps its memory, and a loop over it would stay slow.
        idle, self._idle = self._idle, set()
        return sorted(idle)

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches() if view.num_held and not view.num_computing and not self._absent else ()

    def waits_for(self, view: PolicyView) -> Collection[int]:
        return self._absent if view.num_held else ()

    def shortfall(self, view: PolicyView, offers: Sequence[Offer]) -> int:
        """Return the number of workers that keep the round open and give no batch: a grant of them has timed out, or
        they have no records while every other worker is full."""
        if not offers:
            return super().shortfall(view, offers)
        absent = [offer for offer in offers if not offer.held and not offer.computing]
        stalled = sum(offer.stalled for offer in absent)
        empty = sum(not offer.stalled and not offer.waiting and not offer.lag for offer in absent)
        present = [offer for offer in offers if offer.held or offer.computing]
        full = bool(present) and all(offer.room <= 0 for offer in present)
        return stalled + (empty if full else 0)


SPEC = PolicySpec("bsp", BspPolicyConfig, lambda config: Bsp())
