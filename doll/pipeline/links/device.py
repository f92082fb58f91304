"""The device of a stage: copies between its memory and that of the machine, and what may cross a cut."""

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
    """The CPU: arrays are used where they are."""

    name = "cpu"

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """`array` on the device, without its memory if that is possible: it must not be changed."""
        return _tensor_of(array)

    def get(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """`tensor` in the machine's memory, complete."""
        return _array_of(_plain(tensor))

    def finish(self) -> None:
        """Wait for the work that was begun."""


class CudaDevice(StageDevice):
    """A GPU: copies go through pinned memory, in a stream of their own."""

    def __init__(self, name: str) -> None:
        """`name`: such as `cuda:0`, of a device that is there."""
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
    """The tensor in C order, with no conjugation or sign that is still to be applied."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory."""
    is_bfloat16 = tensor.dtype is torch.bfloat16
    array: npt.NDArray[Any] = tensor.view(torch.int16).numpy().view(BFLOAT16) if is_bfloat16 else tensor.numpy()
    return array


def _tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """The same memory if `array` is in C order."""
    array = np.asarray(array, order="C")  # not ascontiguousarray, which makes a 0-d array 1-d
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def crossing_problem(output: Any) -> str:
    """Why `output` cannot be sent from one stage to the next; "" if it can: a tensor, or dicts, tuples and lists of
    tensors."""
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
    """Whether there is a gradient by numbers of this type."""
    return tensor.is_floating_point() or tensor.is_complex()


class _Received(torch.autograd.Function):
    """The same memory, as a tensor that autograd lets a layer change in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        same = torch.empty(0, dtype=x.dtype, device=x.device)
        return same.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def as_received(x: torch.Tensor) -> torch.Tensor:
    """`x`, which autograd differentiates by, for a layer that may change it in place, as `nn.ReLU(inplace=True)` does.

    Nothing is copied: `x` has the changed numbers too, and only its gradient may be used further on.
    """
    output: torch.Tensor = _Received.apply(x)
    return output


class _JoinedOutputs(torch.autograd.Function):
    """One number after `outputs`. Its gradient is not used: those in `gradients` are passed on.

    What `torch.autograd.graph.get_gradient_edge` is for; `backward` of torch 2.6 takes no edges.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor | None], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)  # of a real type, whatever `outputs` are

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


class SentOutputs:
    """How to differentiate outputs that the next stage has, without keeping their memory here."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._count = len(outputs)
        self._gradients: list[torch.Tensor | None] = []
        self._root = _JoinedOutputs.apply(self._gradients, *outputs)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """`gradients`: of the first outputs, in their shapes; the others have none. A second call is an error of
        autograd, as everywhere."""
        if self._root.requires_grad:
            self._gradients.extend([*gradients, *[None] * (self._count - len(gradients))])
            torch.autograd.backward(self._root)


def check_device(name: str) -> None:
    """
    Raises:
        ConfigError: this machine has no such device.
    """
    if not re.fullmatch(r"cpu|cuda:\d{1,3}", name):
        raise ConfigError(f"device: expected cpu or cuda:N (such as cuda:0), got {name!r}")
    # Counted without CUDA's own start, after which this process could not fork stages that use it.
    count = torch.cuda.device_count()
    if name != "cpu" and int(name.partition(":")[2]) >= count:
        raise ConfigError(f"device {name}: expected cpu, or one of the {count} CUDA devices of this machine")


def open_device(name: str) -> StageDevice:
    """
    Raises:
        ConfigError: this machine has no such device.
    """
    check_device(name)
    return StageDevice() if name == "cpu" else CudaDevice(name)
