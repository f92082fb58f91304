"""Value-bounded asynchronous parallel: no view is further than v_t from the model (the ESSP paper, section 3.2)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import ClassVar, Final, Literal

from pydantic import Field, PositiveFloat

from doll.ps.policies.asp import Asp, AsynchronousConfig
from doll.ps.policies.base import PolicySpec, PolicyView

_MAX_MISSED: Final = 256  # a view that misses so many updates is never allowed: no grant looks at more of them


class VapPolicyConfig(AsynchronousConfig):
    """Asynchronous, with a bound on the values that a worker may miss: no number of its weights is more than
    value_bound / sqrt(t) away from the model's, t being the number of updates."""

    name: Literal["vap"] = "vap"
    value_bound: PositiveFloat = Field(
        default=1.0,
        allow_inf_nan=True,
        description="v_0: by how much the others' steps that a worker has not seen may move any one number, at the "
        "first update; .inf: no bound",
    )

    @property
    def sends_steps(self) -> bool:
        return True


class Vap(Asp):
    """Every step is an update of its own, every worker computes on the newest weights that it can get, and one whose
    weights miss too much of the others' steps does not compute before it has newer ones.

    The paper sends every version to every worker: N messages for an update. A worker reads weights when it begins a
    batch, and then the newest that it knows of, which is its grant's if any has been offered since the last one. So
    each worker is offered the first version behind its join and each of its grants, and no other before its next grant:
    it computes on the same weights, with one message for each batch (docs/decisions/0034).

    What is missed is bounded by the sum, over the updates that it misses, of their largest absolute values: it is never
    less than the largest absolute value of the sum, so the paper's condition (1) holds. The sum is over all other
    workers together; a bound for each of them apart would let a view be P - 1 times as far off (docs/decisions/0034).
    """

    name: ClassVar[str] = "vap"
    sends_versions: ClassVar[bool] = True

    def __init__(self, value_bound: float) -> None:
        """`value_bound`: v_0 > 0; may be infinite."""
        if not value_bound > 0:
            raise ValueError(f"expected a value bound v_0 > 0, got {value_bound}")
        super().__init__()
        self.value_bound = value_bound
        self._live: set[int] = set()
        self._to_offer: set[int] = set()  # live workers that were offered nothing since they joined or were granted
        self._computing: set[int] = set()
        self._moved: dict[int, float] = {}  # of each worker, see WorkerCounters
        # (version, worker, how far its step has moved any one number at most) of the newest updates
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=_MAX_MISSED)

    def bound(self, version: int) -> float:
        """v_t = v_0 / sqrt(t), t being the number of the next update."""
        return self.value_bound / math.sqrt(version + 1)

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        super().changed(view, workers)
        for number in workers:
            worker = view.worker(number)
            if not worker.is_live:
                self._to_offer.discard(number)
            elif (worker.computing and number not in self._computing) or number not in self._live:
                self._to_offer.add(number)
            (self._live.add if worker.is_live else self._live.discard)(number)
            (self._computing.add if worker.computing else self._computing.discard)(number)
            if (step := worker.moved - self._moved.get(number, 0.0)) > 0:
                self._moved[number] = worker.moved
                self._steps.append((view.version, number, step))

    def min_version(self, view: PolicyView, worker: int) -> int:
        if math.isinf(self.value_bound):
            return 0
        missed, bound = 0.0, self.bound(view.version)
        for version, other, step in reversed(self._steps):
            missed += step if other != worker else 0.0
            if missed > bound:
                return version
        is_full = len(self._steps) == _MAX_MISSED
        return self._steps[0][0] if is_full else 0

    def recipients(self, view: PolicyView) -> Collection[int]:
        if not self._to_offer:
            return ()
        offered, self._to_offer = self._to_offer, set()  # a new set: as in `Asp.start`
        return sorted(offered)


SPEC = PolicySpec("vap", VapPolicyConfig, lambda config: Vap(config.value_bound))
