"""Insignificance-bounded synchronous parallel: bsp with significant changes only (the MLLess paper, section 4)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from doll.ps.policies.base import PolicySpec
from doll.ps.policies.bsp import Bsp, LockstepConfig

MAX_SIGNIFICANCE = 1_000.0


class IspPolicyConfig(LockstepConfig):
    """Bulk synchronous, with a significance filter: in round t, a worker sends the change of a number only if it is
    larger than significance / sqrt(t) of the number. The worker adds up smaller changes until the sum is larger."""

    name: Literal["isp"] = "isp"
    significance: float = Field(
        default=0.7,
        ge=0,
        le=MAX_SIGNIFICANCE,
        description="v: the share of a number that a change must exceed to be sent (before contributions: mean divides "
        "it), in the job's first round; it falls with the square root of the number of rounds; 0: everything is sent, "
        "as bsp with contribution: step",
    )

    @property
    def sends_steps(self) -> bool:
        return True

    @property
    def holds_back(self) -> bool:
        return True  # without a filter: what is lost by rounding to 16 bits

    @property
    def publishes_deltas(self) -> bool:
        return True

    @property
    def filter_threshold(self) -> float:
        return self.significance


class Isp(Bsp):
    """The rounds of `Bsp`. Steps that a worker holds back are settled before its batches become durable."""

    name: ClassVar[str] = "isp"
    holds_back = True
    takes_late_pushes = False  # the held-back part may have been requested since


SPEC = PolicySpec("isp", IspPolicyConfig, lambda config: Isp())
