"""At most `limit` workers compute at a time: fewer updates come between a batch's weights and its own update."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

from doll.config.policy import PolicyConfig
from doll.ps.policies.base import BatchId, Policy, PolicySpec, PolicyView
from pydantic import PositiveInt


class FewAtOnceConfig(PolicyConfig):
    """At most `limit` batches are under way."""

    name: Literal["few_at_once"] = "few_at_once"
    limit: PositiveInt = 2
    contribution: Literal["gradient", "step"] = "step"

    @property
    def sends_steps(self) -> bool:
        return self.contribution == "step"

    def batches_per_update(self, num_workers: int) -> int:
        return 1

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        return sum(rates_per_s) / batch_size


class FewAtOnce(Policy):
    name: ClassVar[str] = "few_at_once"
    exact_version: ClassVar[bool] = False

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # workers with a batch that may start, in the order in which they became so

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            if not worker.waiting or worker.computing:
                self._idle.pop(number, None)
            else:
                self._idle.setdefault(number)

    def start(self, view: PolicyView) -> Sequence[int]:
        free = self._limit - view.num_computing - view.num_held
        return tuple(number for number, _ in zip(self._idle, range(free), strict=False))

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches()[:1]


SPEC = PolicySpec("few_at_once", FewAtOnceConfig, lambda config: FewAtOnce(config.limit))
