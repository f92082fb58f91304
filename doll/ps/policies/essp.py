"""Eager SSP: SSP, with new weights sent to all workers whenever the slowest worker has advanced (ESSP paper)."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from doll.ps.policies.base import PolicySpec, PolicyView
from doll.ps.policies.ssp import BoundedStalenessConfig, Ssp


class EsspPolicyConfig(BoundedStalenessConfig):
    """Bounded staleness with eager weights: like ssp, and new weights are sent to all workers before they ask."""

    name: Literal["essp"] = "essp"


class Essp(Ssp):
    """SSP that publishes when the minimum clock increases: staleness is usually one clock, for any s."""

    name: ClassVar[str] = "essp"
    sends_versions: ClassVar[bool] = True

    def __init__(self, staleness: int, under_way: int = 1) -> None:
        super().__init__(staleness, under_way)
        self._offered = 0  # the minimum clock at the last offer

    def recipients(self, view: PolicyView) -> Collection[int]:
        if self._clocks.minimum == self._offered:
            return ()
        self._offered = self._clocks.minimum
        return tuple(self._live)


SPEC = PolicySpec("essp", EsspPolicyConfig, lambda config: Essp(config.staleness, config.under_way))
