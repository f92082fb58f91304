"""Learning rates that depend on the number of updates: torch's schedulers, for torch optimizers and built-in ones.

A schedule advances by one step after each update that has learned something. The first update is made with the first
rates of the scheduler, as in a loop of `optimizer.step(); scheduler.step()`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from doll.config import AdagradConfig, AdamConfig, SchedulePart, SgdConfig
from doll.errors import ConfigError
from doll.optim.named_classes import find_class, like, make
from doll.telemetry import get_logger

log = get_logger(__name__)

_FIELD: Final = "training.schedule"
BuiltIn: TypeAlias = SgdConfig | AdamConfig | AdagradConfig


class Rates(torch.optim.Optimizer):
    """The values of a built-in optimizer that a schedule may change, under the names of torch's optimizer.

    The constructor of torch's class is not called, because it imports torch's compiler.
    """

    def __init__(self, config: BuiltIn) -> None:
        match config:
            case SgdConfig():
                special: dict[str, Any] = {"momentum": config.momentum}
            case AdamConfig():
                special = {"betas": (config.beta1, config.beta2)}
            case AdagradConfig():
                special = {}
        self.defaults = {"lr": config.lr, "weight_decay": config.weight_decay, **special}
        self.param_groups = [{"params": [], **self.defaults}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; torch schedulers require a call of `optimizer.step()` before theirs."""

    def applied_to(self, config: BuiltIn) -> BuiltIn:
        """Return `config` with the current values, for one step."""
        self.step()
        values = {key: value for key, value in self.param_groups[0].items() if key in self.defaults}
        if "betas" in values:
            values["beta1"], values["beta2"] = values.pop("betas")
        return config.model_copy(update=values)


class GroupValues:
    """The first values of an optimizer's groups, such as lr, and the values that have changed since."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._first = [{key: deepcopy(value) for key, value in _values(group)} for group in self._groups]

    def changed(self) -> list[dict[str, Any]]:
        """Return the values of each group that are not as at the beginning."""
        return [
            {key: value for key, value in _values(group) if key not in first or first[key] != value}
            for group, first in zip(self._groups, self._first, strict=True)
        ]

    def restore(self, changed: Sequence[Mapping[str, Any]] = ()) -> None:
        """Restore the values of the beginning, except `changed`. Raises ValueError if `changed` is for another number
        of groups."""
        changed = changed or [{} for _ in self._first]
        for group, first, other in zip(self._groups, self._first, changed, strict=True):
            for key, _ in list(_values(group)):
                del group[key]
            group |= deepcopy(first)
            group |= {key: like(first.get(key), value) for key, value in other.items()}


def _values(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if key != "params"]


class Schedule:
    """The schedulers of a job file on one optimizer."""

    def __init__(self, parts: Sequence[SchedulePart], optimizer: torch.optim.Optimizer, groups: GroupValues) -> None:
        """
        Args:
            groups: values of the groups of `optimizer`.

        Raises:
            ConfigError: a class does not exist, does not accept its arguments, or is not a schedule by updates.
        """
        self._parts = parts
        self._optimizer = optimizer
        self._groups = groups
        self._begin()

    def _begin(self) -> None:
        self._updates = 0
        self._total = self._weight = 0.0  # of the metric since the last step of the scheduler
        self._is_over = False
        self._scheduler = make_scheduler(self._parts, self._optimizer)

    @property
    def metric(self) -> str | None:
        """The name of the metric that the schedule depends on."""
        return self._parts[0].metric

    def measure(self, total: float, weight: float) -> None:
        """Take the metric of the samples of the next update: its weighted sum, and the sum of their weights."""
        self._total += total
        self._weight += weight

    def step(self) -> None:
        """Advance the schedule after an update."""
        self._updates += 1
        if self._is_over:
            return
        measured: tuple[float, ...] = ()
        if self.metric is not None:
            if self._updates % self._parts[0].every_updates or not self._weight:
                return
            measured = (self._total / self._weight,)
            self._total = self._weight = 0.0
        try:
            self._scheduler.step(*measured)  # type: ignore[arg-type]  # a plateau takes its metric
        except ValueError as exc:  # such as OneCycleLR after its last step
            self._is_over = True
            log.warning("schedule_over", updates=self._updates, reason=str(exc), action="the rates stay as they are")

    def go_to(self, updates: int) -> None:
        """Set the rates of the update that follows after `updates` updates."""
        if updates < self._updates:
            self._groups.restore()
            self._begin()
        if updates > self._updates:
            with warnings.catch_warnings():
                # torch warns that the optimizer has made no step before; another process has made it.
                warnings.simplefilter("ignore", UserWarning)
                while self._updates < updates:
                    self.step()

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, without the values of the groups."""
        state = {"updates": self._updates, "is_over": self._is_over, "scheduler": self._scheduler.state_dict()}
        return state if self.metric is None else state | {"measured": [self._total, self._weight]}

    def load(self, state: Mapping[str, Any]) -> None:
        self._updates, self._is_over = state["updates"], state["is_over"]
        self._total, self._weight = state.get("measured", (0.0, 0.0))
        self._scheduler.load_state_dict(like(self._scheduler.state_dict(), state["scheduler"]))


def make_scheduler(parts: Sequence[SchedulePart], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Make one scheduler, or several that follow one another. Raises ConfigError (see `Schedule`)."""
    fields = [_FIELD] if len(parts) == 1 else [f"{_FIELD}.{number}" for number in range(len(parts))]
    schedulers = [
        _made(field, part.cls, part.args, optimizer, has_metric=part.metric is not None)
        for field, part in zip(fields, parts, strict=True)
    ]
    if len(schedulers) == 1:
        return schedulers[0]
    milestones, end = [], 0
    for part in parts[:-1]:
        milestones.append(end := end + (part.updates or 0))
    return make(_FIELD, SequentialLR, "SequentialLR", optimizer, {"schedulers": schedulers, "milestones": milestones})


def _made(
    field: str, name: str, args: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, has_metric: bool = False
) -> LRScheduler:
    cls = find_class(field, name, LRScheduler)
    if issubclass(cls, ReduceLROnPlateau) != has_metric:
        which = f"none for {name}, which counts updates" if has_metric else f"loss or a metric of the task for {name}"
        raise ConfigError(f"{field}.metric: expected {which}")
    inner = {key: _inner(f"{field}.args.{key}", value, optimizer) for key, value in args.items()}
    return make(field, cls, name, optimizer, inner)


def _inner(field: str, value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return an argument of a scheduler. If the job file describes a scheduler as the argument, make that scheduler."""
    if isinstance(value, list):
        return [_inner(f"{field}.{number}", item, optimizer) for number, item in enumerate(value)]
    if isinstance(value, dict) and value.keys() <= {"class", "args"} and isinstance(value.get("class"), str):
        return _made(field, value["class"], value.get("args") or {}, optimizer)
    return value
