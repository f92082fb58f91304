"""Measures the time and memory of a model's layers: the profile for the partitioner (the HetPipe paper, section 4)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from doll.errors import ConfigError
from doll.pipeline.links.device import StageDevice, as_received, is_differentiable, open_device
from doll.pipeline.profiling.layers import Layer, trial_input
from doll.pipeline.profiling.profile import LayerProfile, Profile
from doll.task import passes, trees
from doll.task.base import Task
from doll.task.batches import SampleBatch, batch_of
from doll.task.trees import Tree

_WARM_UP: Final = 2


def sample_batch(task: Task, model: torch.nn.Module, size: int, rng: np.random.Generator) -> SampleBatch:
    """Return `size` held-out samples of the task, repeated if there are fewer; if there are none, random samples. Raise
    ConfigError if there are none and the model does not accept random numbers of the task's shape."""
    held_out = batch_of(task, task.holdout(), size)
    if count := held_out.num_samples:
        return held_out.take([at % count for at in range(size)])
    taken, reason = trial_input(task, model, 2)
    if taken is None:
        raise ConfigError(
            f"{type(task).__name__}: expected held-out samples (holdout), or an input_shape of which its model takes "
            f"numbers, to profile it with; {reason}"
        )
    shape = (size, *taken.x.shape[1:])
    x = rng.normal(size=shape).astype(np.float32) if taken.x.is_floating_point() else rng.integers(2, size=shape)
    if task.num_classes is not None:
        return SampleBatch(x, rng.integers(task.num_classes, size=size))
    return SampleBatch(x, np.zeros(size, np.float32))


def profile_layers(
    task: Task, layers: Sequence[Layer], batch: SampleBatch, *, model: str, device: str = "cpu", repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter, progress: Callable[[int], None] = lambda done: None,
) -> Profile:  # fmt: skip
    """Measure each layer on this machine: medians of `repeats` runs after two runs that are not counted.

    The loss is measured with the last layer. Layers are moved to `device`.

    Args:
        progress: function that is called with the number of measured layers.

    Raises:
        ConfigError: there is no such device, or a layer fails.
    """
    on = open_device(device)
    received, y = passes.collated(task, batch)
    input_bytes = _bytes_of_arrays(received)
    weight, group = (None if part is None else on.put(part) for part in (batch.weight, batch.group))
    inputs = passes.Inputs(None, trees.mapped(on.put, y), weight, group, batch.num_samples, batch.total_weight)
    results: list[tuple[_Measurement, int]] = []  # the size in bytes of the output that is sent to the next layer
    for number, layer in enumerate(layers):
        module = layer.module.to(device).train()
        is_first, is_last = number == 0, number == len(layers) - 1

        def run(x: Tree, module: torch.nn.Module = module, is_first: bool = is_first, is_last: bool = is_last) -> Tree:
            output = passes.forward(task, module, inputs._replace(x=x)) if is_first else module(x)
            return passes.loss(task, output, inputs).total if is_last else output

        try:
            measured = _measure(run, module, received, on, is_first, repeats, clock)
            with torch.no_grad():
                x = trees.mapped(lambda array: on.put(array.copy()), received)
                output = passes.forward(task, module, inputs._replace(x=x)) if is_first else module(x)
        except ConfigError:
            raise
        except Exception as exc:  # the user's module may raise anything
            raise ConfigError(
                f"layer {layer.name!r} fails on a batch of {batch.num_samples} samples: {type(exc).__name__}: {exc}"
            ) from exc
        received = trees.mapped(on.get, output)
        results.append((measured, 0 if is_last else _bytes_of_arrays(received)))
        progress(number + 1)
    kept = _each_once([measured.kept for measured, _ in results])
    profiles = tuple(
        LayerProfile(layer.name, each.forward_s, each.backward_s, activations, sent_bytes, _bytes_of(layer.module))
        for layer, (each, sent_bytes), activations in zip(layers, results, kept, strict=True)
    )
    return Profile(model, batch.num_samples, device, profiles, input_bytes)


class _KeptMemory(NamedTuple):
    """The memory of one layer that autograd keeps from its forward to its backward pass.

    Attributes:
        inside_bytes: memory that is neither input nor output.
        output_bytes: memory of the output, whether it is kept or not.
        is_view: whether the output shares the memory of the input.
    """

    inside_bytes: int
    output_bytes: int
    keeps_input: bool
    keeps_output: bool
    is_view: bool


def _each_once(kept: Sequence[_KeptMemory]) -> list[int]:
    """Return the memory that each layer adds. An output counts for the layer that makes it, if any layer keeps it."""
    sizes: list[int] = []
    is_needed = False  # whether a later layer keeps the output
    for layer in reversed(kept):
        has_output = layer.keeps_output or is_needed
        sizes.append(layer.inside_bytes + (layer.output_bytes if has_output and not layer.is_view else 0))
        is_needed = layer.keeps_input or (layer.is_view and has_output)
    return sizes[::-1]


class _Measurement(NamedTuple):
    forward_s: float
    backward_s: float
    kept: _KeptMemory


def _measure(
    run: Callable[[Tree], Tree], module: torch.nn.Module, received: Tree, on: StageDevice,
    is_first: bool, repeats: int, clock: Callable[[], float],
) -> _Measurement:  # fmt: skip
    forward_s, backward_s = [], []
    largest = _KeptMemory(0, 0, False, False, False)
    for repeat in range(_WARM_UP + repeats):
        x = trees.mapped(lambda array: on.put(array.copy()), received)  # copied, because a layer may change it in place
        if not is_first:
            for tensor in filter(is_differentiable, trees.arrays_of(x)):
                tensor.requires_grad_(True)
        kept: dict[int, int] = {}
        with _collect(kept, module):
            on.finish()
            begin_s = clock()
            output = run(x if is_first else trees.mapped(as_received, x))
            on.finish()
            middle_s = clock()
        if outputs := [tensor for tensor in trees.arrays_of(output) if tensor.requires_grad]:
            gradients = list(map(torch.ones_like, outputs))
            on.finish()
            middle_s, forward_end_s = clock(), middle_s
            torch.autograd.backward(outputs, gradients)
            on.finish()
        else:
            forward_end_s = middle_s
        end_s = clock()
        if repeat >= _WARM_UP:
            forward_s.append(forward_end_s - begin_s)
            backward_s.append(end_s - middle_s)
        # While x and output exist, no other tensor gets their addresses.
        begins, ends = _memory_of(x), _memory_of(output)
        inside_bytes = sum(size for at, size in kept.items() if at not in begins and at not in ends)
        largest = max(
            largest,
            _KeptMemory(
                inside_bytes, sum(ends.values()), not begins.keys().isdisjoint(kept), not ends.keys().isdisjoint(kept),
                ends.keys() <= begins.keys(),
            ),
        )  # fmt: skip
    return _Measurement(statistics.median(forward_s), statistics.median(backward_s), largest)


def _memory_of(tree: Tree) -> dict[int, int]:
    """Return the number of bytes of the memory of the tree's tensors, by address."""
    storages = [tensor.untyped_storage() for tensor in trees.arrays_of(tree)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _bytes_of_arrays(tree: Tree) -> int:
    return sum(array.nbytes for array in trees.arrays_of(tree))


def _collect(kept: dict[int, int], module: torch.nn.Module) -> Any:
    """Collect the memory that autograd keeps for the backward pass, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in _tensors(module)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(module))


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
