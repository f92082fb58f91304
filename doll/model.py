"""A task's model as one flat vector: parameters (and float buffers) are views into it, so publishing it copies nothing.

Layout of the vector: all parameters in `named_parameters()` order, then all float buffers (batch-norm statistics) in
`named_buffers()` order. A gradient vector has the same layout: sums over samples for parameters, and for buffers the
value after the batch times the number of samples, so that the parameter server can take the mean of both.
"""

from __future__ import annotations

import zlib

import torch

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.fingerprint import join
from doll.task import Task


class FlatModel:
    """A module whose parameters, gradients and float buffers are views into flat float32 tensors.

    Attributes:
        module: the task's module.
        flat: float32, shape (num_parameters + num_buffers,).
        grad: float32, as long as `flat`; the module's `.grad`s are views into it, the part of the buffers is free.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Move the module's parameters and float buffers into one flat tensor.

        Raises:
            ConfigError: no trainable parameter, or one that is not float32.
        """
        self.module = module
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
        if not parameters:
            raise ConfigError(f"the task's model {type(module).__name__} has no trainable parameter")
        for name, tensor in [*parameters, *buffers]:
            if tensor.dtype != torch.float32:
                raise ConfigError(f"expected float32 parameters, got {tensor.dtype} for {name!r}: call model.float()")
        self.num_parameters = sum(p.numel() for _, p in parameters)
        self.num_buffers = sum(b.numel() for _, b in buffers)
        self.shapes = tuple((name, tuple(tensor.shape)) for name, tensor in [*parameters, *buffers])
        self.flat = torch.empty(self.num_parameters + self.num_buffers, dtype=torch.float32)
        self.grad = torch.zeros_like(self.flat)
        at = 0
        with torch.no_grad():
            for _, tensor in [*parameters, *buffers]:
                view = self.flat[at : at + tensor.numel()].view(tensor.shape)
                view.copy_(tensor)
                tensor.data = view
                if tensor.requires_grad:
                    tensor.grad = self.grad[at : at + tensor.numel()].view(tensor.shape)
                at += tensor.numel()


def build(config: JobConfig, task: Task) -> FlatModel:
    """The task's model, the same in every process of the job: the seed is set before it is built.

    Raises:
        ConfigError: the task's `build_model` fails, or its model cannot be trained here.
    """
    torch.manual_seed(config.seed)
    try:
        module = task.build_model()
    except Exception as exc:  # the user's code may raise anything
        raise ConfigError(f"{config.task.cls}.build_model() failed: {type(exc).__name__}: {exc}") from exc
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"{config.task.cls}.build_model(): expected a torch.nn.Module, got {type(module).__name__}")
    return FlatModel(module)


def fingerprint(config: JobConfig, model: FlatModel) -> str:
    """What must agree between a checkpoint, the parameter server and its workers (see `doll.fingerprint`)."""
    shapes = zlib.crc32(repr(model.shapes).encode())
    return join(config, parameters=model.num_parameters, buffers=model.num_buffers, shapes=shapes)
