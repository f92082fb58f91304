"""One stage of a virtual worker: a part of the model, on one device, with the weights of the minibatches in flight.

The stage's own weights are the last version that was adopted, with the worker's own steps. A minibatch gets a copy of
them in its slot, so that its backward pass uses what its forward pass used. After it, the slot holds the gradient,
until the coordinator has judged the minibatch and each stage steps on its part. All stages step in the same order, so
a minibatch sees one version of the weights at all of them (vertical sync; the HetPipe paper, section 4).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from doll.config import TrainingConfig
from doll.errors import ConfigError, TaskError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Optimizer, square_length
from doll.pipeline.links.device import Sent, StageDevice, as_received, crossing_problem, is_differentiable
from doll.pipeline.profiling.layers import only_calls
from doll.pipeline.runtime.messages import Commit
from doll.task.base import Task

Array = npt.NDArray[Any]


class VectorRange(NamedTuple):
    """`length` numbers at `here` of a stage's vector and at `there` of the model's."""

    here: int
    there: int
    length: int


def ranges_of(stage: FlatModel, homes: dict[str, int]) -> tuple[VectorRange, ...]:
    """The parts of `stage.flat` that are runs of the model's vector, in order.

    Args:
        homes: `home` of each tensor of the stage's module, by its name there.

    Raises:
        ConfigError: a tensor of the stage is not in the model's vector.
    """
    ranges: list[VectorRange] = []
    for name, tensor in _tensors(stage.module):
        if name not in homes:
            raise ConfigError(f"{name!r} of a stage is not in the model's vector: it is shared, or made in forward()")
        here = home(tensor, stage.flat)
        length = -(-tensor.numel() * tensor.element_size() // 4)
        last = ranges[-1] if ranges else None
        if last is not None and (last.here + last.length, last.there + last.length) == (here, homes[name]):
            ranges[-1] = last._replace(length=last.length + length)
        else:
            ranges.append(VectorRange(here, homes[name], length))
    return tuple(ranges)


def homes_of(module: torch.nn.Module, whole: FlatModel) -> dict[str, int]:
    """Index in `whole.flat` of each trainable parameter and buffer of `module`, a part of its module, by its name."""
    return {name: home(tensor, whole.flat) for name, tensor in _tensors(module)}


def home(tensor: torch.Tensor, flat: torch.Tensor) -> int:
    """Index in `flat`, float32, of the first number of `tensor`, which is a view of it.

    Raises:
        ConfigError: it is not.
    """
    at, odd = divmod(tensor.data_ptr() - flat.data_ptr(), 4)
    if odd or not 0 <= at <= len(flat):
        raise ConfigError("a parameter of the model is not in its vector: it is shared between layers, or replaced")
    return at


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As `FlatModel` lays them out, without empty ones."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    buffers = sorted(module.named_buffers(), key=lambda item: not item[1].is_floating_point())
    return ((name, tensor) for name, tensor in (*parameters, *buffers) if tensor.numel())


class Loss(NamedTuple):
    """Of one minibatch, at the last stage: sums over its samples."""

    loss_sum: float
    metric_sums: Mapping[str, float]


class StageGradient(NamedTuple):
    """What a stage knows of a minibatch's gradient.

    Attributes:
        of_input: of the activations that it received; None: these have no gradient.
        squares: sum of the squares of its numbers, of this stage.
        buffer_squares: of the change of the float buffers, of this stage.
    """

    of_input: torch.Tensor | None
    squares: float
    buffer_squares: float


class _Wave(NamedTuple):
    until: int
    steps: torch.Tensor


@dataclass(slots=True)
class _InFlight:
    """What autograd needs of one minibatch."""

    input: torch.Tensor
    output: torch.Tensor | Sent  # of the last stage: its own, then the loss
    num_samples: int


class Stage:
    """The layers of one stage. Not thread-safe."""

    def __init__(
        self, task: Task, whole: FlatModel, layers: Sequence[torch.nn.Module], *, training: TrainingConfig, slots: int,
        is_first: bool, is_last: bool, device: StageDevice,
    ) -> None:  # fmt: skip
        """
        Args:
            whole: the undivided model; `layers` are a part of its module, and leave it.
            slots: N_m, minibatches in flight.

        Raises:
            ConfigError: a parameter is not in the model's vector.
        """
        self._task, self.device = task, device
        self._is_first, self._is_last = is_first, is_last
        module = torch.nn.Sequential(*layers)
        homes = homes_of(module, whole)
        for parameter in module.parameters():
            parameter.grad = None  # it leaves the whole model's gradient; `to` takes the parameter out of its vector
        module = module.to(device.name)
        self._local = FlatModel(module, device=device.name, may_be_empty=True)
        self.ranges: tuple[VectorRange, ...] = ranges_of(self._local, homes)
        self._optimizer = Optimizer(self._local, training.optimizer, sum_in=self._local.grad)
        # One backward pass at a time: they share the gradient.
        self._replicas = [
            FlatModel(_replica(module), device=device.name, may_be_empty=True, grad=self._local.grad)
            for _ in range(slots)
        ]
        self._in_flight: dict[int, _InFlight] = {}
        self._buffer_squares: dict[int, float] = {}
        self._wave: torch.Tensor | None = None  # steps of the wave under way
        self._waves: deque[_Wave] = deque()  # whole ones that the weights in use need not hold
        _warm_up()

    @property
    def weights(self) -> torch.Tensor:
        """The stage's own weights: float32, shape (numel,), laid out as `doll.model.flat_model` says for its layers."""
        return self._local.flat.detach()

    # --- weights ----------------------------------------------------------------------------------------------------

    def adopt(self, shared: npt.NDArray[np.float32], included: int) -> None:
        """Use this stage's part of `shared`, with the own steps that it does not hold.

        Args:
            shared: float32, shape (numel of the whole model,).
            included: how many batches of this worker's stream it holds.
        """
        flat = self._local.flat.detach()
        for part in self.ranges:
            source = torch.from_numpy(shared[part.there : part.there + part.length])
            flat[part.here : part.here + part.length].copy_(source)
        while self._waves and self._waves[0].until <= included:
            self._waves.popleft()
        n = self._local.num_parameters
        for wave in self._waves:
            flat[:n] += wave.steps[:n]
        if self._wave is not None:
            flat[:n] += self._wave[:n]

    def commit(self, commit: Commit) -> None:
        """Step on the gradient in the slot, or drop it; end the wave.

        Raises:
            DivergedError: a number of the weights or of the optimizer's state is not finite.
        """
        if commit.scale and commit.slot >= 0:
            replica, n, floats = self._replicas[commit.slot], self._local.num_parameters, self._local.num_floats
            weights, step = self._local.flat.detach(), replica.flat.detach()
            self._optimizer.add(step)  # a copy, in the memory of the gradient: the slot is free
            step[:n] = weights[:n]
            self._optimizer.apply([], commit.scale, commit.num_samples)
            torch.sub(weights[:n], step[:n], out=step[:n])
            if self._wave is None:
                self._wave = step.clone()
            else:
                self._wave[:floats] += step[:floats]
                self._wave[floats:] = step[floats:]
        if commit.ends_wave and self._wave is not None:
            self._waves.append(_Wave(commit.batch + 1, self._wave))
            self._wave = None

    def forget(self, batch: int) -> None:
        """The steps of this batch and later ones are void. The weights are right again when a version is adopted."""
        while self._waves and self._waves[-1].until > batch:
            self._waves.pop()
        self._wave = None

    def store(self, until: int, shared: npt.NDArray[np.float32]) -> None:
        """Write the sum of the steps of the wave below `until` to its places in `shared`."""
        steps = next((wave.steps for wave in self._waves if wave.until == until), None)
        self._write(torch.zeros_like(self._local.flat) if steps is None else steps, shared)

    def show(self, shared: npt.NDArray[np.float32]) -> None:
        """Write the stage's own weights to their places in `shared`."""
        self._write(self.weights, shared)

    def _write(self, values: torch.Tensor, shared: npt.NDArray[np.float32]) -> None:
        for part in self.ranges:
            target = torch.from_numpy(shared[part.there : part.there + part.length])
            target.copy_(values[part.here : part.here + part.length])

    # --- minibatches ------------------------------------------------------------------------------------------------

    def forward(self, slot: int, x: Array, num_samples: int) -> torch.Tensor:
        """Output of this stage for `x`: samples of shape (num_samples, ...) at the first stage, else activations, whose
        leading dimension may be any: (time, samples, ...), or samples and time in one.

        Raises:
            TaskError: the output is nothing that the next stage can take, or `Task.forward` does something with it that
                belongs behind the last stage.
        """
        replica = self._replicas[slot]
        replica.flat.detach().copy_(self.weights)
        module = replica.module.train()
        n = num_samples
        if n == 1:
            _use_running_stats(module)
        received = self.device.put(x)
        if self._is_first and self._is_last:
            output = self._task.forward(module, received)
        elif self._is_first:
            output, is_all = only_calls(self._task, module, received)
            if not is_all:
                raise TaskError(
                    f"{type(self._task).__name__}.forward does more than to call the model and to return its output: "
                    "the first stage has a part of the model only; put what comes behind it into the model"
                )
        else:
            if is_differentiable(received):
                received.requires_grad_(True)
            output = module(as_received(received))
        if not self._is_last and (problem := crossing_problem(output)):
            raise TaskError(f"this stage {problem}: cut the model elsewhere (worker.pipeline.layers)")
        replica.restore_buffers()
        parameters, floats = self._local.num_parameters, self._local.num_floats
        change = replica.flat.detach()[parameters:floats] - self.weights[parameters:floats]
        self._buffer_squares[slot] = square_length(change) if len(change) else 0.0
        self._in_flight[slot] = _InFlight(received, output if self._is_last else Sent(output), n)
        return output.detach()

    def loss(self, slot: int, y: Array) -> Loss:
        """At the last stage: the loss, whose gradient `backward` then takes."""
        item = self._in_flight[slot]
        target = self.device.put(y)
        output = item.output
        assert isinstance(output, torch.Tensor)
        loss = self._task.loss(output, target)
        with torch.no_grad():
            metrics = self._task.metrics(output.detach(), target)
        n = item.num_samples
        item.output = loss * n  # the task's loss is a mean; the sum costs no pass over the gradient
        return Loss(float(loss.detach()) * n, {name: float(value) * n for name, value in metrics.items()})

    def backward(self, slot: int, gradient: Array | None) -> StageGradient:
        """Backward pass; then the slot holds the gradient instead of the weights.

        Args:
            gradient: of the output; None at the last stage.
        """
        item = self._in_flight.pop(slot)
        replica = self._replicas[slot]
        gradients = replica.grad
        gradients.zero_()
        if isinstance(item.output, Sent):
            if gradient is not None:
                item.output.backward(self.device.put(gradient))
        elif item.output.requires_grad:
            torch.autograd.backward(item.output)
        flat, n, floats = replica.flat.detach(), self._local.num_parameters, self._local.num_floats
        flat[:n] = gradients[:n]
        flat[n:floats] *= item.num_samples
        squares = square_length(flat[:n]) if n else 0.0
        return StageGradient(None if self._is_first else item.input.grad, squares, self._buffer_squares.pop(slot))

    def drop(self, slot: int) -> None:
        """There will be no backward pass."""
        self._in_flight.pop(slot, None)
        self._buffer_squares.pop(slot, None)


def _warm_up() -> None:
    """The first backward pass of a process takes some milliseconds more than the next."""
    weights = torch.ones(2, 2, requires_grad=True)
    torch.autograd.backward(torch.nn.functional.linear(torch.ones(2, 2), weights), torch.ones(2, 2))


def _replica(module: torch.nn.Module) -> torch.nn.Module:
    """A copy, without the frozen parameters, which never change."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


def _use_running_stats(module: torch.nn.Module) -> None:
    """One sample has no variance: its normalisation uses the statistics so far."""
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.eval()
