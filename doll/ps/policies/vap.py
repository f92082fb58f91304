"""Value-bounded asynchronous parallel: no view differs from the model by more than v_t (ESSP paper, section 3.2)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat

from doll.ps.policies.asp import AsynchronousConfig
from doll.ps.policies.base import BatchId, Policy, PolicySpec, PolicyView


class VapPolicyConfig(AsynchronousConfig):
    """Asynchronous, with a bound on the changes that a worker may miss: when its step is applied as update t, no number
    of the weights that it was computed on differs from the model's by more than value_bound / sqrt(t)."""

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


@dataclass(slots=True)
class _View:
    """The weights (view) on which one batch under way is computed.

    Attributes:
        place: place in the order of grants.
        applied: value of `Vap._applied` when the batch was granted: the view has all these steps.
        step: largest absolute value of the batch's step; until it is known, of the worker's last step.
        is_held: True if the step is at the server and not applied.
    """

    place: int
    applied: float
    step: float
    is_held: bool = False


class Vap(Policy):
    """Each step is an update of its own. A worker whose step would change another worker's view by too much waits.

    Each batch is computed on the newest weights. Its view misses the steps that are applied while it is computed. When
    a step is applied, condition (1) of the paper holds: no number of the sum of the steps that its view misses is
    larger than v_t = v_0 / sqrt(t), where t is the number of this update. Three rules ensure this:

    - Steps are applied in the order of their grants, when they come. A step is applied only if after it no older view
      misses more than v_t. Otherwise it waits until the steps of these views are applied.
    - A step whose own view misses more than v_t, because a step of an older view had to be applied, is not applied. Its
      batch is computed again (`void`).
    - A batch is granted only if the steps under way are expected to keep the bound, each as large as the last step of
      its worker. So few batches are computed again.
    The oldest view never misses too much, so some step can always be applied. The amount that a view misses is the sum
    of the largest absolute values of the missed steps of all other workers. So the bound holds in every coordinate, and
    for all workers together (docs/decisions/0062).
    """

    name: ClassVar[str] = "vap"
    exact_version: ClassVar[bool] = False

    def __init__(self, value_bound: float) -> None:
        """`value_bound`: v_0 > 0; it may be infinite."""
        self.value_bound = value_bound
        # A late push answers a later grant than the grant of its view, so the amount that its view misses is not known.
        self.takes_late_pushes = math.isinf(value_bound)
        self._applied = 0.0  # sum of the largest absolute values of the applied steps
        self._moved: dict[int, float] = {}  # of each worker, see `WorkerCounters`
        self._views: OrderedDict[int, _View] = OrderedDict()  # by worker, in the order of their grants
        self._under_way = 0.0  # sum of the steps of `_views`
        self._held: list[tuple[int, int]] = []  # heap of (place, worker) of held steps, with outdated entries
        self._last_step: dict[int, float] = {}  # of each worker
        self._places = 0
        self._idle: OrderedDict[int, None] = OrderedDict()  # workers that may get a batch, the longest waiting first

    def bound(self, version: int) -> float:
        """Return v_t = v_0 / sqrt(t) for the update t that makes `version`, so t = version."""
        return self.value_bound / math.sqrt(version)

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            if (step := worker.moved - self._moved.get(number, 0.0)) > 0:
                self._moved[number] = worker.moved
                self._applied += step
            mine = self._views.get(number)
            if mine is not None and worker.held and not mine.is_held:
                mine.is_held = True
                heappush(self._held, (mine.place, number))
                self._under_way += worker.held_change - mine.step
                mine.step = self._last_step[number] = worker.held_change
            elif mine is not None and not worker.held and not worker.computing:  # applied, void, or lost
                self._under_way -= mine.step
                del self._views[number]
                if not self._views:
                    self._under_way = 0.0  # removes rounding errors
            if not worker.waiting or number in self._views:
                self._idle.pop(number, None)
            elif number not in self._idle:
                self._idle[number] = None

    def start(self, view: PolicyView) -> Sequence[int]:
        started: list[int] = []
        oldest = next(iter(self._views.values()), None)
        while self._idle:
            number = next(iter(self._idle))
            step = self._last_step.get(number, 0.0)
            if oldest is None:
                oldest = _View(0, self._applied, step)
            elif self._will_miss(oldest, step) > self.bound(view.version + len(self._views) + len(started) + 1):
                break
            del self._idle[number]
            self._under_way += step
            started.append(number)
        started.sort()  # the order in which they are granted
        for number in started:
            self._places += 1
            self._views[number] = _View(self._places, self._applied, self._last_step.get(number, 0.0))
        return started

    def void(self, view: PolicyView) -> Sequence[BatchId]:
        number = self._first_held()
        if number is None or self._misses(number) <= self.bound(view.version + 1):
            return ()
        return (view.worker(number).first_held,)

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        number = self._first_held()
        if number is None:
            return ()
        oldest = next(iter(self._views))
        # The oldest view can be applied at the update after this one at the earliest.
        if oldest != number and self._misses(oldest, number) > self.bound(view.version + 2):
            return ()
        return (view.worker(number).first_held,)

    def _will_miss(self, oldest: _View, step: float) -> float:
        """Return the most that a view misses after all steps under way and a new one, `step`, are applied. This is
        either the oldest view or the view of the new step."""
        return max(self._under_way, self._applied - oldest.applied + self._under_way - oldest.step + step)

    def _misses(self, number: int, behind: int | None = None) -> float:
        """Return the amount that this worker's view misses; with `behind`, after that worker's held step is applied."""
        step = 0.0 if behind is None else self._views[behind].step
        return self._applied - self._views[number].applied + step

    def _first_held(self) -> int | None:
        """Return the worker with the earliest grant among the workers whose steps are held."""
        while self._held:
            place, number = self._held[0]
            mine = self._views.get(number)
            if mine is not None and mine.place == place:
                return number
            heappop(self._held)
        return None


SPEC = PolicySpec("vap", VapPolicyConfig, lambda config: Vap(config.value_bound))
