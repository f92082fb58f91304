"""What a stage computes on: copies between its memory and that of the machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from doll.errors import ConfigError


class Device:
    """The CPU: arrays are used where they are."""

    name = "cpu"

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """`array` on the device, without its memory where that is possible: it must not be changed."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def get(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """`tensor` in the machine's memory, complete."""
        array: npt.NDArray[Any] = tensor.contiguous().numpy()
        return array

    def finish(self) -> None:
        """Wait for what was begun."""


class CudaDevice(Device):
    """A GPU: copies go through pinned memory, in a stream of their own."""

    def __init__(self, name: str) -> None:
        """`name`: such as `cuda:0`.

        Raises:
            ConfigError: there is no such device.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(name.partition(":")[2]) >= count:
            raise ConfigError(f"worker.pipeline.devices: {name}: expected one of {count} CUDA devices of this machine")
        self.name = name
        torch.cuda.set_device(name)
        self._copies = torch.cuda.Stream(device=name)  # type: ignore[no-untyped-call]

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        with torch.cuda.stream(self._copies):
            tensor = pinned.to(self.name, non_blocking=True)
        computing = torch.cuda.current_stream(self.name)
        computing.wait_stream(self._copies)
        tensor.record_stream(computing)  # its memory was allocated in the other stream
        return tensor

    def get(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        self._copies.wait_stream(torch.cuda.current_stream(self.name))
        with torch.cuda.stream(self._copies):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)
        self._copies.synchronize()
        array: npt.NDArray[Any] = pinned.numpy()
        return array

    def finish(self) -> None:
        torch.cuda.synchronize(self.name)


def open_device(name: str) -> Device:
    """
    Raises:
        ConfigError: this machine has no such device.
    """
    return Device() if name == "cpu" else CudaDevice(name)
