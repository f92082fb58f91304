"""Stale synchronous parallel: no worker is more than s batches ahead of the slowest (Ho et al.; ESSP paper)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from doll.ps.policies.base import PolicySpec
from doll.ps.policies.gated import GatedByClock, GatedConfig

MAX_STALENESS = 10_000


class BoundedStalenessConfig(GatedConfig):
    """The common options of SSP and ESSP."""

    staleness: NonNegativeInt = Field(
        default=3,
        le=MAX_STALENESS,
        description="s: how many batches a worker may be ahead of the slowest one that has any",
    )
    under_way: PositiveInt = Field(
        default=2,
        le=MAX_STALENESS + 1,
        description="how many batches of a worker may be granted and not in the model: with 1 it waits for a round "
        "trip after each batch, with more it computes meanwhile; the paper's is staleness + 1: more changes nothing",
    )

    @property
    def pushes_under_way(self) -> int:
        return min(self.under_way, self.staleness + 1)

    @property
    def bound_text(self) -> str:
        return f"no worker may be more than {self.staleness} batches ahead of the slowest"

    def batches_per_update(self, num_workers: int) -> int:
        return 1


class SspPolicyConfig(BoundedStalenessConfig):
    """Bounded staleness: a worker waits when it is more than s batches ahead of the slowest one."""

    name: Literal["ssp"] = "ssp"


class Ssp(GatedByClock):
    """A batch at clock t starts when the model has all batches below t - s of every live worker that has batches. The
    batch is computed on weights with these batches. Each step is an update of its own.

    A worker may continue while its pushes are being sent. This does not change the bound: the rule uses the batch's own
    clock, and the minimum clock includes the worker's own batches in the model, so at most s + 1 are under way.
    """

    name: ClassVar[str] = "ssp"
    takes_later_weights: ClassVar[bool] = True

    def __init__(self, staleness: int, under_way: int = 1) -> None:
        """`staleness`: s >= 0. `under_way`: how many batches of a worker may be granted and not in the model, >= 1."""
        self.staleness = staleness
        self._under_way = under_way
        super().__init__(history=staleness)

    def max_under_way(self) -> int:
        return self._under_way

    def needed(self, batch: int, offset: int) -> int:
        return batch + offset - self.staleness


SPEC = PolicySpec("ssp", SspPolicyConfig, lambda config: Ssp(config.staleness, config.under_way))
