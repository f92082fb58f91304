"""Tensors whose memory is a file. They are for a model that is larger than the available memory.

The kernel keeps a file's pages in memory while there is room, and otherwise writes them to the disk. The pages do not
count as the data of a process (RLIMIT_DATA).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

FROM_BYTES: Final = 1 << 20
_MADV_DONTNEED: Final = 4  # <sys/mman.h>


def zeros_in_file(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros of shape (numel,) in a file without a name, which forked processes share. Raises OSError if the
    folder for temporary files cannot be written."""
    size_bytes = max(1, numel * dtype.itemsize)
    with tempfile.TemporaryFile(prefix="doll-", buffering=0) as file:
        os.ftruncate(file.fileno(), size_bytes)
        memory = mmap.mmap(file.fileno(), size_bytes)  # keeps the file open
    return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.zeros(0, dtype=dtype)


def forget_pages(tensor: torch.Tensor) -> None:
    """Remove the pages of a tensor in a file from this process. They are read from the file when they are used again.

    Never call it with a tensor that is not in a file: its values would be lost.
    """
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    if length > 0:
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        libc.madvise(start, length, _MADV_DONTNEED)


class LargeTensorsInFiles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which new CPU tensors of `FROM_BYTES` or more are moved into files, one after the other.

    Their values are the same as without this context, so a model that is built in it is the same.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        given: set[int] = set()

        def note(value: Any) -> None:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                given.add(value.untyped_storage().data_ptr())

        tree_map(note, (args, dict(kwargs or {})))

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
                return value
            if value.nbytes < FROM_BYTES or value.untyped_storage().data_ptr() in given or not value.is_contiguous():
                return value
            return zeros_in_file(value.numel(), value.dtype).view(value.shape).copy_(value)

        return tree_map(moved, func(*args, **(kwargs or {})))
