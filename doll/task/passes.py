"""The passes of a task over a batch: output, loss and metrics. Loss and metrics are weighted sums over the samples.

A method of a task gets `weight` or `group` only if it has a parameter of this name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from doll.errors import TaskError
from doll.metrics.states import MetricState, to_bytes
from doll.task import trees
from doll.task.base import Sample, Task, by_sample
from doll.task.batches import SampleBatch
from doll.task.forms import as_feature, as_features, as_target
from doll.task.trees import Ragged


class Inputs(NamedTuple):
    """A batch in the form that the task's methods get.

    Attributes:
        x, y: trees of tensors.
        weight, group: weights and group ids of the samples, as in `SampleBatch`.
        num_samples: number of samples.
        total_weight: sum of the weights.
    """

    x: Any
    y: Any
    weight: torch.Tensor | None
    group: torch.Tensor | None
    num_samples: int
    total_weight: float

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """Return the same batch with `move` applied to each tensor, for example to copy it to a device."""
        weight = None if self.weight is None else move(self.weight)
        group = None if self.group is None else move(self.group)
        y = None if self.y is None else trees.mapped(move, self.y)
        return self._replace(x=trees.mapped(move, self.x), y=y, weight=weight, group=group)


def inputs_of(task: Task, batch: SampleBatch) -> Inputs:
    """Return the tensors of a batch. They share the memory of its arrays if possible.

    Raises:
        Exception: any exception of `Task.collate`.
    """
    x, y = collated(task, batch)
    weight, group = (None if part is None else torch.from_numpy(part) for part in (batch.weight, batch.group))
    return Inputs(
        trees.mapped(_tensor, x), trees.mapped(_tensor, y), weight, group, batch.num_samples, batch.total_weight
    )


def collated(task: Task, batch: SampleBatch) -> tuple[Any, Any]:
    """Return x and y of a batch as trees of arrays.

    Raises:
        Exception: any exception of `Task.collate`.
    """
    if not isinstance(batch.x, Ragged):
        return batch.x, batch.y
    weights = [1.0] * batch.num_samples if batch.weight is None else batch.weight.tolist()
    groups = [None] * batch.num_samples if batch.group is None else batch.group.tolist()
    x, y = task.collate(list(map(Sample, batch.x, batch.y, weights, groups)))
    is_alone = not isinstance(x, dict | tuple | list)
    return trees.mapped(as_features if is_alone else as_feature, x), trees.mapped(as_target, y)


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, order="C"))


def forward(task: Task, module: torch.nn.Module, inputs: Inputs) -> Any:
    """Compute the model's output."""
    if takes(task, "forward", "group"):
        return task.forward(module, inputs.x, group=inputs.group)  # type: ignore[call-arg]
    return task.forward(module, inputs.x)


class Loss(NamedTuple):
    """The sum of the samples' losses: as a scalar tensor that can be differentiated, and as a number."""

    total: torch.Tensor
    value: float


def loss(task: Task, output: Any, inputs: Inputs) -> Loss:
    """Compute the loss of a batch.

    Raises:
        TaskError: samples have weights and the task only defines a mean; or the task returned a value that is not a
            loss.
    """
    # If no weight is above 0, there is no weighted mean. The plain mean then shows whether the loss can be computed.
    weight = inputs.weight if inputs.total_weight else None
    has_losses_of_groups = takes(task, "losses", "group") and not task.defines("loss")  # `Task.loss` passes no groups
    if not has_losses_of_groups and (weight is None or takes(task, "loss", "weight")):
        more = {"group": inputs.group} if takes(task, "loss", "group") else {}
        if takes(task, "loss", "weight"):
            more["weight"] = weight
        mean = task.loss(output, inputs.y, **more)
        _expect(task, "loss", mean, "the mean over the batch, a tensor of one number", (), (1,))
        # The loss is a sum because a sum needs no additional pass over the gradient.
        return Loss(mean * inputs.total_weight, float(mean.detach()) * inputs.total_weight)
    if task.defines("loss") and not task.defines("losses"):
        raise TaskError(
            f"{type(task).__name__}: samples have weights, and its loss(output, target) is a mean without them: define "
            "losses(output, target), the loss of each sample, or give loss a parameter weight"
        )
    more = {"group": inputs.group} if takes(task, "losses", "group") else {}
    losses = task.losses(output, inputs.y, **more)
    count = inputs.num_samples
    _expect(task, "losses", losses, f"one loss for each of {count} samples, a tensor of shape ({count},)", (count,))
    total = (losses if inputs.weight is None else losses * inputs.weight.to(losses.dtype)).sum()
    return Loss(total, float(total.detach()))


def _expect(task: Task, method: str, loss: Any, what: str, *shapes: tuple[int, ...]) -> None:
    """Check the loss that a task returned.

    Raises:
        TaskError: `loss` is not a tensor of one of these shapes.
    """
    name = f"{type(task).__name__}.{method}()"
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"{name}: expected {what}, got {type(loss).__name__}: compute it from the output with torch")
    if loss.shape not in shapes:
        hint = ""
        if method == "loss" and loss.ndim:
            hint = ": return its mean(), or name the method losses() if it gives the loss of each sample"
        raise TaskError(f"{name}: expected {what}, got a tensor of shape {tuple(loss.shape)}{hint}")


def metric_sums(task: Task, output: Any, inputs: Inputs) -> dict[str, float | bytes]:
    """Return the metrics by name: the sums over the samples, or encoded states.

    Raises:
        TaskError: samples have weights, and a metric is only given as a mean; or a state is too long for a record.
    """
    values = metric_values(task, output, inputs)
    try:
        return {name: to_bytes(value) if isinstance(value, MetricState) else value for name, value in values.items()}
    except ValueError as exc:
        raise TaskError(f"{type(task).__name__}.metrics(): {exc}") from exc


def metric_values(task: Task, output: Any, inputs: Inputs) -> dict[str, float | MetricState]:
    """Return the metrics by name as `metric_sums`, but states as objects. It raises the same TaskError."""
    more = {"group": inputs.group} if takes(task, "metrics", "group") else {}
    if takes(task, "metrics", "weight"):
        weight = inputs.weight if inputs.total_weight else None
        means = task.metrics(output, inputs.y, weight=weight, **more)  # type: ignore[call-arg]
        return {
            name: value if isinstance(value, MetricState) else float(value) * inputs.total_weight
            for name, value in means.items()
            if inputs.total_weight or not isinstance(value, MetricState)  # such a batch counts in no state
        }
    if inputs.weight is not None and not task.defines("metrics"):
        if task.num_classes is None:
            return {}
        values: Mapping[str, Any] = {"accuracy": by_sample((output.argmax(dim=1) == inputs.y).cpu().double())}
    else:
        values = task.metrics(output, inputs.y, **more)
    return {name: _metric_sum(task, name, value, inputs) for name, value in values.items()}


def _metric_sum(task: Task, name: str, value: Any, inputs: Inputs) -> float | MetricState:
    if (is_state := isinstance(value, MetricState)) and inputs.weight is None:
        return value
    if isinstance(value, torch.Tensor) and value.ndim == 1 and len(value) == inputs.num_samples > 1:
        values = value.cpu().double()
        return float(values.sum() if inputs.weight is None else (values * inputs.weight.cpu()).sum())
    if is_state or (inputs.weight is not None and inputs.num_samples > 1 and inputs.total_weight):
        raise TaskError(
            f"{type(task).__name__}: samples have weights, and metrics() gives a value without them for {name!r}: "
            "return a tensor with the value of each sample, or give metrics a parameter weight"
        )
    return float(value) * inputs.total_weight


def takes(task: Task, method: str, name: str) -> bool:
    """Return whether a method of the task has a parameter of this name."""
    return name in _parameters(getattr(type(task), method))


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
