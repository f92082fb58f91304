"""The device of a stage: copies between its memory and the machine's, and checks of outputs before they are sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from doll.errors import ConfigError
from doll.pipeline.links.frames import BFLOAT16, MAX_CROSSING, MAX_DIMENSIONS
from doll.task import trees

CROSSING_TYPES: Final = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Types of the tensors that a stage may send: those of `frames.DTYPES`."""


class StageDevice:
    """The CPU as a device: arrays are used without a copy."""

    name = "cpu"

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return `array` on the device, in the same memory if possible. Do not change it."""
        return _tensor_of(array)

    def get(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Return a complete copy of `tensor` in the machine's memory."""
        return _array_of(_plain(tensor))

    def finish(self) -> None:
        """Wait until the started work is complete."""


class CudaDevice(StageDevice):
    """A GPU as a device: copies go through pinned memory and run in a separate stream."""

    def __init__(self, name: str) -> None:
        """`name`: name of an existing device, such as `cuda:0`."""
        self.name = name
        torch.cuda.set_device(name)
        self._copies = torch.cuda.Stream(device=name)  # type: ignore[no-untyped-call]

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        pinned = _tensor_of(array).pin_memory()
        with torch.cuda.stream(self._copies):
            tensor = pinned.to(self.name, non_blocking=True)
        computing = torch.cuda.current_stream(self.name)
        computing.wait_stream(self._copies)
        tensor.record_stream(computing)  # its memory was allocated in the other stream
        return tensor

    def get(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        tensor = _plain(tensor)
        self._copies.wait_stream(torch.cuda.current_stream(self.name))
        with torch.cuda.stream(self._copies):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)
        self._copies.synchronize()
        return _array_of(pinned)

    def finish(self) -> None:
        torch.cuda.synchronize(self.name)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in C order, with pending conjugations and negations applied."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return an array that shares the memory of the tensor."""
    is_bfloat16 = tensor.dtype is torch.bfloat16
    array: npt.NDArray[Any] = tensor.view(torch.int16).numpy().view(BFLOAT16) if is_bfloat16 else tensor.numpy()
    return array


def _tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of the array, or a copy if the array is not in C order."""
    array = np.asarray(array, order="C")  # not ascontiguousarray, which makes a 0-d array 1-d
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def crossing_problem(output: Any) -> str:
    """Return why `output` cannot be sent to the next stage; "" for a tensor, or dicts, tuples and lists of tensors."""
    leaves, _ = trees.flat(output)
    if len(leaves) > MAX_CROSSING:
        return f"returns {len(leaves)} tensors, expected at most {MAX_CROSSING}"
    try:
        trees.numbered(output)
    except TypeError as exc:
        return f"returns a dict: {exc}"
    return next((problem for leaf in leaves if (problem := _problem(leaf))), "" if leaves else "returns no tensor")


def _problem(output: Any) -> str:
    if not isinstance(output, torch.Tensor):
        return f"returns {type(output).__name__}, expected one tensor"
    if output.layout is not torch.strided:
        return f"returns a tensor of layout {output.layout}, expected a dense one (to_dense())"
    if output.dtype not in CROSSING_TYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in CROSSING_TYPES)
        return f"returns a tensor of type {output.dtype}, expected one of {names}"
    if output.ndim > MAX_DIMENSIONS:
        return f"returns a tensor of {output.ndim} dimensions, expected at most {MAX_DIMENSIONS}"
    return ""


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return whether gradients exist for the numeric type of this tensor."""
    return tensor.is_floating_point() or tensor.is_complex()


class _Received(torch.autograd.Function):
    """A function that returns a tensor with the same memory, which a layer may change in place under autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        same = torch.empty(0, dtype=x.dtype, device=x.device)
        return same.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def as_received(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, with a gradient, for a layer that may change it in place, such as `nn.ReLU(inplace=True)`.

    The result shares the memory of `x`, so the layer also changes `x`. Afterwards, use only the gradient of `x`.
    """
    output: torch.Tensor = _Received.apply(x)
    return output


class _JoinedOutputs(torch.autograd.Function):
    """A function that joins `outputs` into one number. Its backward pass ignores the gradient of this number, and
    passes on `gradients`.

    This function replaces `torch.autograd.graph.get_gradient_edge`, because `backward` of torch 2.6 does not accept
    edges.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor | None], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)  # its type is real even if `outputs` are complex

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


class SentOutputs:
    """The outputs that were sent to the next stage, kept for the backward pass without their memory."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._count = len(outputs)
        self._gradients: list[torch.Tensor | None] = []
        self._root = _JoinedOutputs.apply(self._gradients, *outputs)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the backward pass, only once. `gradients`: gradients of the first outputs; further outputs have none."""
        if self._root.requires_grad:
            self._gradients.extend([*gradients, *[None] * (self._count - len(gradients))])
            torch.autograd.backward(self._root)


def check_device(name: str) -> None:
    """Raise ConfigError if this machine does not have the device."""
    if not re.fullmatch(r"cpu|cuda:\d{1,3}", name):
        raise ConfigError(f"device: expected cpu or cuda:N (such as cuda:0), got {name!r}")
    # The devices are counted without initializing CUDA. After initializing it, this process could not fork stages.
    count = torch.cuda.device_count()
    if name != "cpu" and int(name.partition(":")[2]) >= count:
        raise ConfigError(f"device {name}: expected cpu, or one of the {count} CUDA devices of this machine")


def open_device(name: str) -> StageDevice:
    """Open a device. Raise ConfigError if this machine does not have it."""
    check_device(name)
    return StageDevice() if name == "cpu" else CudaDevice(name)
