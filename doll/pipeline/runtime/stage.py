"""One stage of a virtual worker: a part of the model, on one device, with the weights of the minibatches in flight.

The stage's own weights are the last adopted version plus the worker's own steps. Each minibatch gets a copy of them (a
replica), so that its backward pass uses the same weights as its forward pass. After the backward pass, the gradient
waits in the minibatch's slot until the coordinator has accepted or refused the minibatch. If it is accepted, each stage
makes a step with its part. All stages step in the same order, so a minibatch uses the same version of the weights at
all stages (vertical sync; the HetPipe paper, section 4).

Memory: the weights, the gradient, the optimizer's state, and a replica for each minibatch between its two passes, as in
the paper. The last stage, and a stage with one minibatch in flight, need no replica. Waiting gradients and the steps of
waves are in `doll.pipeline.runtime.vectors`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import torch

from doll.config import TrainingConfig
from doll.errors import ConfigError, TaskError
from doll.model.flat_model import FlatModel
from doll.model.random_numbers import draw_from
from doll.optim.optimizer import Optimizer, square_length
from doll.pipeline.links.device import SentOutputs, StageDevice, as_received, crossing_problem, is_differentiable
from doll.pipeline.profiling.layers import only_calls
from doll.pipeline.runtime.messages import Commit
from doll.pipeline.runtime.vectors import (
    PIECE,
    VectorFile,
    Vectors,
    VectorsInFile,
    VectorsInMemory,
    WritableVector,
    pieces,
)
from doll.task import passes, trees
from doll.task.base import Task
from doll.task.trees import Tree

Array = npt.NDArray[Any]
_NOTHING: Final = torch.zeros(0)


class VectorRange(NamedTuple):
    """A range of `length` numbers that begins at `here` in a stage's vector and at `there` in the model's vector."""

    here: int
    there: int
    length: int


def ranges_of(stage: FlatModel, homes: dict[str, int]) -> tuple[VectorRange, ...]:
    """Return the parts of `stage.flat` that are contiguous in the model's vector, in order.

    Args:
        homes: index in the model's vector (`home`) of each tensor of the stage's module, by its name in this module.

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
    """Return the index in `whole.flat` of each trainable parameter and buffer of `module`, a part of its module."""
    return {name: home(tensor, whole.flat) for name, tensor in _tensors(module)}


def home(tensor: torch.Tensor, flat: torch.Tensor) -> int:
    """Return the index in `flat`, float32, of the first number of `tensor`. Raise ConfigError if `tensor` is not a view
    of `flat`."""
    at, odd = divmod(tensor.data_ptr() - flat.data_ptr(), 4)
    if odd or not 0 <= at <= len(flat):
        raise ConfigError("a parameter of the model is not in its vector: it is shared between layers, or replaced")
    return at


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the order of `FlatModel`, without empty tensors."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    buffers = sorted(module.named_buffers(), key=lambda item: not item[1].is_floating_point())
    return ((name, tensor) for name, tensor in (*parameters, *buffers) if tensor.numel())


class StageLoss(NamedTuple):
    """The loss of one minibatch, at the last stage: sums over its samples."""

    loss_sum: float
    metric_sums: Mapping[str, float | bytes]


class StageGradient(NamedTuple):
    """The results of a stage's backward pass for one minibatch.

    Attributes:
        of_input: gradient of each received activation; None: this one has no gradient. Empty: none has a gradient.
        squares: sum of the squares of the gradient's numbers at this stage.
        buffer_squares: sum of the squares of the changes of the float buffers at this stage.
    """

    of_input: tuple[torch.Tensor | None, ...]
    squares: float
    buffer_squares: float


class _Wave(NamedTuple):
    """The sum of the steps of a wave, below batch `until`, stored in vector `number`."""

    until: int
    number: int


@dataclass(slots=True)
class _InFlight:
    """The state of one minibatch between its passes."""

    replica: FlatModel
    buffers: torch.Tensor  # values before its forward pass
    input: list[torch.Tensor]
    output: Any  # `SentOutputs`; at the last stage the output, later the loss
    num_samples: int
    weight: float


class Stage:
    """The layers of one stage. Not thread-safe."""

    def __init__(
        self, task: Task, whole: FlatModel, layers: Sequence[torch.nn.Module], *, training: TrainingConfig, slots: int,
        is_first: bool, is_last: bool, device: StageDevice, is_limited: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            whole: the undivided model; `layers` are a part of its module, and are removed from it.
            slots: N_m, the number of minibatches in flight.
            is_limited: whether the device's memory is limited; data that is not needed for computing is then in a file.

        Raises:
            ConfigError: a parameter is not in the model's vector.
        """
        self._task, self.device = task, device
        self._is_first, self._is_last = is_first, is_last
        module = torch.nn.Sequential(*layers)
        homes = homes_of(module, whole)
        for parameter in module.parameters():
            parameter.grad = None  # detaches it from the model's gradient; `to` detaches it from the model's vector
        module = module.to(device.name)
        self._local = FlatModel(module, device=device.name, may_be_empty=True)
        self.ranges: tuple[VectorRange, ...] = ranges_of(self._local, homes)
        self._optimizer = Optimizer(self._local, training.optimizer, sum_in=self._local.grad)
        # Free replicas; at most as many as were needed at once. A minibatch needs no replica if the weights do not
        # change between its passes, as at the last stage, which runs both passes in one step.
        self._replicas = [self._local] if slots == 1 or is_last else []
        self._in_flight: dict[int, _InFlight] = {}
        self._buffer_squares: dict[int, float] = {}
        self._absent: dict[int, int] = {}  # by slot, for its gradient: see `FlatModel.absent`
        # Vectors by number: the gradients of slots (numbers below `slots`), then the steps of waves.
        numel = self._local.flat.numel()
        self._vectors: Vectors = VectorsInFile(numel) if is_limited else VectorsInMemory(numel, device.name)
        self._piece = torch.empty(min(PIECE, numel), dtype=torch.float32, device=device.name)
        self._first_wave = slots  # number of the first vector for waves
        self._wave: int | None = None  # vector of the current wave; None: the wave has no steps yet
        self._waves: deque[_Wave] = deque()  # complete waves that the weights in use may not include
        _warm_up()

    @property
    def weights(self) -> torch.Tensor:
        """The stage's own weights: float32, shape (numel,), in the layout of `doll.model.flat_model` for its layers."""
        return self._local.flat.detach()

    # --- weights ----------------------------------------------------------------------------------------------------

    def adopt(self, shared: VectorFile, included: int) -> None:
        """Use this stage's part of `shared`, plus the own steps that `shared` does not include.

        Args:
            shared: vector of the whole model.
            included: number of batches of this worker's stream that `shared` includes.
        """
        flat = self._local.flat.detach()
        for part in self.ranges:
            shared.read(part.there, flat[part.here : part.here + part.length])
        while self._waves and self._waves[0].until <= included:
            self._vectors.free(self._waves.popleft().number)
        under_way = () if self._wave is None else (self._wave,)
        for number in (*(wave.number for wave in self._waves), *under_way):
            for piece in pieces(0, self._local.num_parameters):
                flat[piece] += self._read(number, piece)

    def commit(self, commit: Commit) -> None:
        """Apply the gradient in the slot as a step, or drop it; end the wave if the commit does. Raise DivergedError if
        a number of the weights or of the optimizer's state is not finite."""
        if commit.scale and commit.slot >= 0:
            weights, n = self.weights, self._local.num_parameters
            gradient = self._local.grad
            self._vectors.read(commit.slot, 0, gradient)
            self._optimizer.add(gradient)  # the optimizer reads it in place
            # The slot now has the weights before the step, followed by the buffers of the minibatch.
            self._vectors.write(commit.slot, 0, weights[:n])
            self._optimizer.apply(
                [], commit.scale, commit.weight, absent=self._absent[commit.slot], lr_factor=commit.lr_factor
            )
            self._add_to_wave(commit.slot)
        if commit.slot >= 0:
            self._vectors.free(commit.slot)
        if commit.ends_wave and self._wave is not None:
            self._waves.append(_Wave(commit.batch + 1, self._wave))
            self._wave = None

    def _add_to_wave(self, before: int) -> None:
        """Add the step to the wave: the parameters in use minus those in vector `before`, and the step's buffers."""
        is_first = self._wave is None
        if self._wave is None:
            taken = {wave.number for wave in self._waves}
            self._wave = next(number for number in count(self._first_wave) if number not in taken)
        n, floats, numel = self._local.num_parameters, self._local.num_floats, self._local.flat.numel()
        for part in pieces(0, n):
            step = self.weights[part] - self._read(before, part)
            self._vectors.write(self._wave, part.start, step if is_first else step.add_(self._read(self._wave, part)))
        for part in pieces(n, floats):
            values = self._read(before, part)
            self._vectors.write(
                self._wave, part.start, values if is_first else values.clone().add_(self._read(self._wave, part))
            )
        for part in pieces(floats, numel):  # buffers of other types: the bytes of the last minibatch
            self._vectors.write(self._wave, part.start, self._read(before, part))

    def _read(self, number: int, part: slice) -> torch.Tensor:
        """Return `part` of vector `number`; it is valid until the next call."""
        piece = self._piece[: part.stop - part.start]
        self._vectors.read(number, part.start, piece)
        return piece

    def forget(self, batch: int) -> None:
        """Mark the steps of this batch and later ones as void. The next `adopt` makes the weights correct again."""
        while self._waves and self._waves[-1].until > batch:
            self._vectors.free(self._waves.pop().number)
        if self._wave is not None:
            self._vectors.free(self._wave)
            self._wave = None

    def store(self, until: int, shared: WritableVector) -> None:
        """Write the sum of the steps of the wave below `until` into this stage's ranges of `shared`."""
        number = next((wave.number for wave in self._waves if wave.until == until), None)
        for part in self.ranges:
            for piece in pieces(part.here, part.here + part.length):
                values = torch.zeros(piece.stop - piece.start) if number is None else self._read(number, piece)
                shared.write(part.there + piece.start - part.here, values)

    def show(self, shared: WritableVector) -> None:
        """Write the stage's own weights into this stage's ranges of `shared`."""
        for part in self.ranges:
            shared.write(part.there, self.weights[part.here : part.here + part.length])

    # --- minibatches ------------------------------------------------------------------------------------------------

    def forward(
        self, slot: int, x: Tree, num_samples: int, weight: float = -1.0, group: Array | None = None, *,
        seed: int | None = None,
    ) -> Tree:  # fmt: skip
        """Compute the output of this stage for `x`. `x` has samples of shape (num_samples, ...) at the first stage,
        otherwise activations with any leading dimension: (time, samples, ...), or samples and time in one dimension.
        `x` and the output are arrays, or dicts, tuples and lists of arrays.

        Args:
            weight: sum of the samples' weights; -1: the number of samples.
            group: groups of the samples, see `Task.forward`.
            seed: seed of the random numbers of this pass and of the loss. None: the generators are not seeded again.

        Raises:
            TaskError: the next stage cannot use the output, or `Task.forward` changes the output, which it may do only
                after the last stage.
        """
        self.drop(slot)
        replica = self._take_replica()
        parameters, floats = self._local.num_parameters, self._local.num_floats
        if replica is not self._local:
            replica.flat.detach().copy_(self.weights)
        buffers = self.weights[parameters:].clone()
        weight = float(num_samples) if weight < 0 else weight
        self._in_flight[slot] = item = _InFlight(replica, buffers, [], _NOTHING, num_samples, weight)
        if seed is not None:
            draw_from(seed, self.device.name)
        module = replica.module.train()
        n = num_samples
        if n == 1:  # one sample has no variance
            replica.use_running_stats()
        received = trees.mapped(self.device.put, x)
        inputs = passes.Inputs(received, None, None, None if group is None else self.device.put(group), n, weight)
        if self._is_first and self._is_last:
            output = passes.forward(self._task, module, inputs)
        elif self._is_first:
            output, is_all = only_calls(self._task, module, inputs)
            if not is_all:
                raise TaskError(
                    f"{type(self._task).__name__}.forward does more than to call the model and to return its output: "
                    "the first stage has a part of the model only; put what comes after it into the model"
                )
        else:
            for tensor in trees.arrays_of(received):
                if is_differentiable(tensor):
                    tensor.requires_grad_(True)
            output = module(trees.mapped(as_received, received))
        if not self._is_last and (problem := crossing_problem(output)):
            raise TaskError(f"this stage {problem}: cut the model elsewhere (worker.pipeline.layers)")
        replica.restore_buffers()
        change = replica.flat.detach()[parameters:floats] - buffers[: floats - parameters]
        self._buffer_squares[slot] = square_length(change) if len(change) else 0.0
        item.input = trees.arrays_of(received)
        item.output = output if self._is_last else SentOutputs(trees.arrays_of(output))
        return trees.mapped(torch.Tensor.detach, output)

    def loss(self, slot: int, y: Tree, weight: Array | None = None, group: Array | None = None) -> StageLoss:
        """Compute the loss at the last stage. `backward` then computes its gradient, before the next `forward`.

        Args:
            weight, group: weights and groups of the samples, as in `doll.task.batches.SampleBatch`.
        """
        item = self._in_flight[slot]
        weights, groups = (None if part is None else self.device.put(part) for part in (weight, group))
        target = trees.mapped(self.device.put, y)
        inputs = passes.Inputs(None, target, weights, groups, item.num_samples, item.weight)
        output = item.output
        loss = passes.loss(self._task, output, inputs)
        with torch.no_grad():
            metrics = passes.metric_sums(self._task, trees.mapped(torch.Tensor.detach, output), inputs)
        item.output = loss.total
        return StageLoss(loss.value, metrics)

    def backward(self, slot: int, gradients_of: Sequence[Array | None] = ()) -> StageGradient:
        """Run the backward pass. Afterwards the slot holds the gradient instead of the weights.

        Args:
            gradients_of: gradient of each output; empty at the last stage, or if no output has a gradient.
        """
        item = self._in_flight[slot]
        replica = item.replica
        gradients = replica.grad
        replica.begin_gradient()
        if isinstance(item.output, SentOutputs):
            if any(part is not None for part in gradients_of):
                item.output.backward([None if part is None else self.device.put(part) for part in gradients_of])
        elif item.output.requires_grad:
            torch.autograd.backward(item.output)
        self._absent[slot] = replica.absent()
        flat, n, floats = replica.flat.detach(), self._local.num_parameters, self._local.num_floats
        flat[n:floats] *= item.weight
        self._vectors.write(slot, 0, gradients[:n])
        self._vectors.write(slot, n, flat[n:])
        squares = square_length(gradients[:n]) if n else 0.0
        of_input = () if self._is_first else tuple(tensor.grad for tensor in item.input)
        result = StageGradient(of_input, squares, self._buffer_squares[slot])
        self.drop(slot)
        return result

    def drop(self, slot: int) -> None:
        """Free a slot that needs no further backward pass."""
        item = self._in_flight.pop(slot, None)
        if item is not None:
            self._replicas.append(item.replica)
            if item.replica is self._local:
                self.weights[self._local.num_parameters :] = item.buffers
        self._buffer_squares.pop(slot, None)

    def _take_replica(self) -> FlatModel:
        if self._replicas:
            return self._replicas.pop()
        # Only one backward pass runs at a time, so replicas share the memory of the gradient.
        module = _replica(self._local.module)
        return FlatModel(module, device=self.device.name, may_be_empty=True, grad=self._local.grad)


def _warm_up() -> None:
    """Run a backward pass, because the first one of a process takes some milliseconds more than later ones."""
    weights = torch.ones(2, 2, requires_grad=True)
    torch.autograd.backward(torch.nn.functional.linear(torch.ones(2, 2), weights), torch.ones(2, 2))


def _replica(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the module that shares its memory. `FlatModel` then moves all tensors that are not frozen."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        is_trained = parameter.requires_grad
        memo[id(parameter)] = torch.nn.Parameter(parameter.detach()) if is_trained else parameter
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach()
    return copy.deepcopy(module, memo)
