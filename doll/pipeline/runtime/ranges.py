"""Where the numbers of a stage are in the vector of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from doll.errors import ConfigError
from doll.model.flat_model import FlatModel


class Range(NamedTuple):
    """`length` numbers at `here` of a stage's vector and at `there` of the model's."""

    here: int
    there: int
    length: int


def ranges_of(stage: FlatModel, whole: FlatModel, homes: dict[str, int]) -> tuple[Range, ...]:
    """The parts of `stage.flat` that are runs of `whole.flat`, in order.

    Args:
        homes: `home` of each tensor of the stage's module, by its name there.

    Raises:
        ConfigError: a tensor of the stage is not in the model's vector.
    """
    ranges: list[Range] = []
    for name, tensor in _tensors(stage.module):
        if name not in homes:
            raise ConfigError(f"{name!r} of a stage is not in the model's vector: it is shared, or made in forward()")
        here = home(tensor, stage.flat)
        length = -(-tensor.numel() * tensor.element_size() // 4)
        last = ranges[-1] if ranges else None
        if last is not None and (last.here + last.length, last.there + last.length) == (here, homes[name]):
            ranges[-1] = last._replace(length=last.length + length)
        else:
            ranges.append(Range(here, homes[name], length))
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
    """As `FlatModel` lays them out; without those that have no numbers."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    buffers = sorted(module.named_buffers(), key=lambda item: not item[1].is_floating_point())
    return ((name, tensor) for name, tensor in (*parameters, *buffers) if tensor.numel())
