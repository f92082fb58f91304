"""DOLL: an update is K gradients of distinct batches, all computed at the same version (Algorithms 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from doll.config.policy import PolicyConfig
from doll.ps.policies.base import BatchId, PolicySpec, PolicyView


class DollPolicyConfig(PolicyConfig):
    """Groups of K batches, all computed at the same version (the DOLL paper, Algorithms 3 and 4)."""

    name: Literal["doll"] = "doll"
    group_size: PositiveInt = Field(default=4, description="K: batches per model update")

    def batches_per_update(self, num_workers: int) -> int:
        return self.group_size

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        """λ_U = (sum of the arrival rates) / (K b).

        Source: the DOLL paper, Eq. (1), for streams of unequal rates.

        >>> DollPolicyConfig(group_size=20).update_rate_per_s([125.0] * 64, batch_size=256)
        1.5625
        """
        return sum(rates_per_s) / (self.group_size * batch_size)


class Doll:
    """Groups of K batches.

    The group is whatever is held or being computed. When a batch drops out (its owner went down, its gradient was
    lost) the group has a free place, which the next waiting batch takes at the same version: the replacement of
    digest D3. Places go to distinct workers first, so that gradients are computed in parallel.
    """

    name: ClassVar[str] = "doll"
    exact_version: ClassVar[bool] = True

    def __init__(self, group_size: int) -> None:
        """`group_size`: K >= 1."""
        if group_size < 1:
            raise ValueError(f"expected a group size K >= 1, got {group_size}")
        self.group_size = group_size

    def start(self, view: PolicyView) -> Sequence[int]:
        in_group = view.num_held + view.num_computing
        if in_group == 0 and view.num_waiting < self.group_size:
            return ()  # a group is opened only when it can be filled at once
        free = self.group_size - in_group
        if free <= 0 or not view.num_waiting:
            return ()
        places = {worker: state.held + state.computing for worker, state in view.workers()} if in_group else {}
        if not places:
            return [worker for worker, _ in islice(view.waiting_batches(), free)]
        # Fewest batches of the same worker in the group first, then order of announcement (sorted is stable).
        order = sorted(view.waiting_batches(), key=lambda item: places[item[0]] + item[1])
        return [worker for worker, _ in order[:free]]

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches() if view.num_held == self.group_size else ()


SPEC = PolicySpec("doll", DollPolicyConfig, lambda config: Doll(config.group_size), exact_version=True)
