"""The step of any torch optimizer class, with the parameters of the flat vector and their names.

The parameters are views of the updater's own memory, and their gradients are views of the sum. So the class always
works on the same tensors. If the new weights must be in other memory, they are copied there afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from doll.config import SchedulePart, TorchConfig
from doll.errors import CheckpointError, ConfigError
from doll.model.flat_model import FlatModel
from doll.optim.named_classes import find_class, make, packed, unpacked
from doll.optim.optimizer import SQUARES, STATE, VALUES, Optimizer, expect_finite
from doll.optim.schedule import GroupValues, Schedule
from doll.task.base import described

_FIELD: Final = "training.optimizer"
_TRIAL_SIZE: Final = 8  # maximum size of each dimension in a trial
_NORM_EPSILON: Final = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_NAMES_SHOWN: Final = 8


class TorchOptimizer(Optimizer):
    """An `Optimizer` with an optimizer class of torch or another package. Raises ConfigError (see `TorchSteps`)."""

    def _make_schedule(self, parts: Sequence[SchedulePart]) -> Schedule | None:
        """Make the optimizer of the class, and its schedule."""
        assert isinstance(self._config, TorchConfig)
        if not isinstance(self._model, FlatModel):
            raise ConfigError(
                f"{_FIELD}.class: expected ps.shards: 1, because {self._config.cls} may use all numbers of a parameter"
            )
        self._parameters: dict[str, torch.Tensor] = {}
        at = 0
        for name, parameter in _trainable(self._model).items():
            here = slice(at, at := at + parameter.numel())
            view = torch.nn.Parameter(self._own[here].view(parameter.shape))
            view.grad = self._sum[here].view(parameter.shape)
            self._parameters[name] = view
        self._steps = TorchSteps(self._parameters, self._config, parts)
        return self._steps.schedule

    def _state_tensors(self) -> dict[str, npt.NDArray[Any]]:
        return self._steps.tensors()

    def _load_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self._steps.load(tensors)

    def _squares(self) -> Iterable[torch.Tensor]:
        return (part for _, key, part in self._steps.state() if key in SQUARES and isinstance(part, torch.Tensor))

    def _clip(self, gradient: torch.Tensor, further: float) -> float:
        """Clip as torch.nn.utils does, to the bit."""
        parameters = self._parameters.values()
        if self._clip_value is not None:
            expect_finite(gradient)
            torch.nn.utils.clip_grad_value_(parameters, self._clip_value, foreach=False)
        if self._clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(
                [parameter.grad for parameter in parameters if parameter.grad is not None], foreach=False
            )
            if further:
                norm = torch.hypot(norm, norm.new_tensor(further))
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm, foreach=False)
            self.clipped_by = min(1.0, self._clip_norm / (float(norm) + _NORM_EPSILON))
        return 1.0

    def _apply_sum(self, scale: float, weight: float, target: torch.Tensor, absent: int, lr_factor: float) -> None:
        without = [part for place, part in enumerate(self._parameters.values()) if absent >> place & 1]
        gradients = [parameter.grad for parameter in without]
        for parameter in without:
            parameter.grad = None
        try:
            super()._apply_sum(scale, weight, target, absent, lr_factor)
        finally:
            for parameter, gradient in zip(without, gradients, strict=True):
                parameter.grad = gradient

    def _step(self, gradient: torch.Tensor, factor: float, target: torch.Tensor, absent: int, lr_factor: float) -> None:
        gradient *= factor
        self._steps.step(lr_factor)
        own = self._own[: self.num_parameters]
        if target.data_ptr() != own.data_ptr():
            target.copy_(own)


class TorchSteps:
    """A torch optimizer with its groups and its schedule. A checkpoint has its state by the names of parameters."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], config: TorchConfig, schedule: Sequence[SchedulePart] = ()
    ) -> None:
        """
        Args:
            parameters: parameters by name, with their gradients.

        Raises:
            ConfigError: the optimizer, a group or the schedule cannot be made with the given values.
        """
        self._parameters = parameters
        cls = find_class(_FIELD, config.cls, torch.optim.Optimizer)
        groups = _groups(parameters, config.groups)
        self._optimizer = make(_FIELD, cls, config.cls, groups, config.args)
        for pattern, args in config.groups.items():
            if unknown := [key for key in args if key not in self._optimizer.defaults]:
                raise ConfigError(
                    f"{_FIELD}.groups.{pattern}: {config.cls} has no {unknown[0]!r}: expected some of "
                    f"{', '.join(self._optimizer.defaults)}"
                )
        self._groups = GroupValues(self._optimizer)
        self.schedule = Schedule(schedule, self._optimizer, self._groups) if schedule else None

    def step(self, lr_factor: float = 1.0) -> None:
        """Make a step with `lr_factor` times the learning rate of each group."""
        groups = self._optimizer.param_groups if lr_factor != 1 else []
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * lr_factor
        self._optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def state(self) -> Iterable[tuple[str, str, Any]]:
        """Yield a parameter's name, the key of a part of its state, and the part; always in the same order."""
        for name, parameter in self._parameters.items():
            for key, part in sorted(self._optimizer.state.get(parameter, {}).items()):
                yield name, key, part

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the state's tensors by parameter name, and all other state in one array. Raises ConfigError
        if a part of the state is neither a tensor nor plain values."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        plain: list[tuple[str, str, Any]] = []
        raw: dict[str, tuple[str, list[int]]] = {}
        for name, key, part in self.state():
            if not isinstance(part, torch.Tensor):
                plain.append((name, key, part))
                continue
            label = f"{STATE}{name}.{key}"
            part = part.detach().contiguous()
            try:
                tensors[label] = part.numpy(force=True).copy()
            except TypeError:  # numpy lacks this type, such as bfloat16
                raw[label] = (str(part.dtype).removeprefix("torch."), list(part.shape))
                tensors[label] = part.reshape(-1).view(torch.uint8).numpy(force=True).copy()
        values = {"plain": plain, "raw": raw, "groups": self._groups.changed()}
        if self.schedule is not None:
            values["schedule"] = self.schedule.state()
        tensors[VALUES] = packed(values)
        return tensors

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a result of `tensors`. Raises CheckpointError if it is for other parameters or another
        optimizer."""
        values = unpacked(tensors.get(VALUES))
        self._optimizer.state.clear()
        try:
            for label, array in tensors.items():
                if not label.startswith(STATE) or label == VALUES:
                    continue
                name, _, key = label.removeprefix(STATE).rpartition(".")
                tensor = torch.from_numpy(np.array(array))
                if label in values.get("raw", {}):
                    dtype, shape = values["raw"][label]
                    tensor = tensor.view(getattr(torch, dtype)).view(shape)
                self._optimizer.state[self._parameters[name]][key] = tensor
            for name, key, part in values.get("plain", ()):
                self._optimizer.state[self._parameters[name]][key] = part
            self._groups.restore(values.get("groups", ()))
            if self.schedule is not None and "schedule" in values:
                self.schedule.load(values["schedule"])
        except (KeyError, ValueError, AttributeError, TypeError) as exc:
            raise CheckpointError(
                f"expected the state of {_FIELD} for the parameters of this model, got another one: {exc!r}"
            ) from exc


def _groups(parameters: Mapping[str, torch.Tensor], groups: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups in their order, after the default group if it has a parameter."""
    members: dict[str | None, list[torch.Tensor]] = {None: [], **{pattern: [] for pattern in groups}}
    for name, parameter in parameters.items():
        members[next((pattern for pattern in groups if re.search(pattern, name)), None)].append(parameter)
    for pattern in groups:
        if members[pattern]:
            continue
        earlier = any(re.search(pattern, name) for name in parameters)
        names = ", ".join(list(parameters)[:_NAMES_SHOWN]) + (", ..." if len(parameters) > _NAMES_SHOWN else "")
        raise ConfigError(
            f"{_FIELD}.groups: expected a regular expression that is found in the name of a parameter, got {pattern!r}"
            + (", and earlier ones have all that it is found in" if earlier else "")
            + f"; parameters: {names}"
        )
    made: list[dict[str, Any]] = [{"params": members[None]}] if members[None] else []
    return made + [{"params": members[pattern], **args} for pattern, args in groups.items()]


def _trainable(model: FlatModel) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}


def check_torch_optimizer(model: FlatModel, config: TorchConfig, schedule: Sequence[SchedulePart]) -> None:
    """Test the optimizer: make some steps on a small copy of the model, and on a second copy that continues from the
    state of the first. Raises ConfigError if the optimizer or the schedule cannot be made, needs more than gradients,
    or has state that a checkpoint cannot hold."""
    first = _small(model)
    steps = TorchSteps(first, config, schedule)
    _take(steps, first, config)
    tensors = steps.tensors()
    second = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in first.items()}
    successor = TorchSteps(second, config, schedule)
    try:
        successor.load(tensors)
    except CheckpointError as exc:
        raise ConfigError(f"{_FIELD}.class: {config.cls} does not go on from its own state: {exc}") from exc
    _take(steps, first, config)
    _take(successor, second, config)
    if not all(torch.equal(parameter, second[name]) for name, parameter in first.items()):
        raise ConfigError(
            f"{_FIELD}.class: expected an optimizer that keeps all that it needs in `state` and `param_groups`, and "
            f"draws no random numbers, so that a restart makes the same model; {config.cls} made another one"
        )


def _small(model: FlatModel) -> dict[str, torch.Tensor]:
    small: dict[str, torch.Tensor] = {}
    for name, parameter in _trainable(model).items():
        part = parameter.detach()
        for dimension, size in enumerate(part.shape):
            part = part.narrow(dimension, 0, min(size, _TRIAL_SIZE))
        small[name] = torch.nn.Parameter(part.clone())
    return small


def _take(steps: TorchSteps, parameters: Mapping[str, torch.Tensor], config: TorchConfig) -> None:
    for number in (1, 2):
        for parameter in parameters.values():
            parameter.grad = torch.linspace(-0.01, 0.01 * number, parameter.numel()).view(parameter.shape)
        try:
            steps.step(lr_factor=0.5)  # a class without a learning rate is refused, too
        except Exception as exc:  # the optimizer may raise anything
            raise ConfigError(
                f"{_FIELD}.class: expected an optimizer whose step() needs dense gradients alone; {config.cls} failed "
                f"in a trial: {described(exc)}"
            ) from exc
        if steps.schedule is not None:
            steps.schedule.step()
