"""Measures what each layer of a model takes: the profile that the partitioner reads (the HetPipe paper, section 4)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from doll.errors import ConfigError
from doll.pipeline.device import Device, as_received, open_device
from doll.pipeline.layers import Layer, trial_input
from doll.pipeline.profile import LayerProfile, Profile
from doll.task import Task, stack

_WARM_UP: Final = 2


class Batch(NamedTuple):
    """x of shape (n, ...), y of shape (n, ...)."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]


def sample_batch(task: Task, model: torch.nn.Module, size: int, rng: np.random.Generator) -> Batch:
    """`size` samples: held-out ones of the task, repeated where there are fewer; else random ones of its shape.

    Raises:
        ConfigError: the task has no held-out samples, and no shape of which its model takes numbers.
    """
    x, y = stack(sample for sample, _ in zip(task.holdout(), range(size), strict=False))
    if len(x):
        at = np.arange(size) % len(x)
        return Batch(x[at], y[at])
    taken = trial_input(task, model, 2)
    if taken is None:
        raise ConfigError(
            f"{type(task).__name__}: expected held-out samples (holdout), or an input_shape of which its model takes "
            "numbers, to profile it with"
        )
    shape = (size, *taken.shape[1:])
    x = rng.normal(size=shape).astype(np.float32) if taken.is_floating_point() else rng.integers(2, size=shape)
    if task.num_classes is not None:
        return Batch(x, rng.integers(task.num_classes, size=size))
    return Batch(x, np.zeros(size, np.float32))


def profile_layers(
    task: Task, layers: Sequence[Layer], batch: Batch, *, model: str, device: str = "cpu", repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter, progress: Callable[[int], None] = lambda done: None,
) -> Profile:  # fmt: skip
    """Measure each layer on this machine, medians of `repeats` runs after two that do not count.

    The loss is part of the last layer. Layers are moved to `device`.

    Args:
        model: its name, for the file.
        progress: is told how many layers are done.

    Raises:
        ConfigError: there is no such device, or a layer fails.
    """
    on = open_device(device)
    target = on.put(batch.y)
    received: npt.NDArray[Any] = batch.x
    profiles: list[LayerProfile] = []
    for number, layer in enumerate(layers):
        module = layer.module.to(device).train()
        is_first, is_last = number == 0, number == len(layers) - 1

        def run(
            x: torch.Tensor, module: torch.nn.Module = module, is_first: bool = is_first, is_last: bool = is_last
        ) -> torch.Tensor:
            output = task.forward(module, x) if is_first else module(x)
            return task.loss(output, target) if is_last else output

        try:
            measured = _measure(run, module, received, on, is_first, repeats, clock)
            with torch.no_grad():
                x = on.put(received.copy())
                output = task.forward(module, x) if is_first else module(x)
        except ConfigError:
            raise
        except Exception as exc:  # the user's module may raise anything
            raise ConfigError(
                f"layer {layer.name!r} fails on a batch of {len(batch.x)} samples: {type(exc).__name__}: {exc}"
            ) from exc
        sent = on.get(output)
        profiles.append(
            LayerProfile(
                layer.name, measured.forward_s, measured.backward_s, measured.activation_bytes,
                0 if is_last else sent.nbytes, _bytes_of(module),
            )
        )  # fmt: skip
        received = sent
        progress(number + 1)
    return Profile(model, len(batch.x), device, tuple(profiles), batch.x.nbytes)


class _Measured(NamedTuple):
    forward_s: float
    backward_s: float
    activation_bytes: int


def _measure(
    run: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module, received: npt.NDArray[Any], on: Device,
    is_first: bool, repeats: int, clock: Callable[[], float],
) -> _Measured:  # fmt: skip
    forward_s, backward_s = [], []
    kept_bytes = 0
    for repeat in range(_WARM_UP + repeats):
        x = on.put(received.copy())  # a layer may change it in place
        if not is_first and x.is_floating_point():
            x.requires_grad_(True)
        kept: dict[int, int] = {}
        with _kept(kept, module):
            on.finish()
            begin_s = clock()
            output = run(x if is_first else as_received(x))
            on.finish()
            middle_s = clock()
        if output.requires_grad:
            gradient = torch.ones_like(output)
            on.finish()
            middle_s, forward_end_s = clock(), middle_s
            torch.autograd.backward(output, gradient)
            on.finish()
        else:
            forward_end_s = middle_s
        end_s = clock()
        if repeat >= _WARM_UP:
            forward_s.append(forward_end_s - begin_s)
            backward_s.append(end_s - middle_s)
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        kept_bytes = max(kept_bytes, sum(kept.values()))
    return _Measured(statistics.median(forward_s), statistics.median(backward_s), kept_bytes)


def _kept(kept: dict[int, int], module: torch.nn.Module) -> Any:
    """Collect the memory that autograd keeps for the backward pass, without that of parameters and buffers."""
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
