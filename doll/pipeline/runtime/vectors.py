"""Vectors that a stage keeps in addition to its weights, in memory or in files.

Files are for a stage with limited memory: no process holds their content. The kernel caches their pages while memory is
free, and otherwise writes them to disk.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

PIECE: Final = 1 << 17
"""Numbers that are read or written at once: 512 KiB, which a processor's cache holds. Arrays of 1 MiB and more are
mapped again each time freed memory is returned (`doll.process.memory`)."""


def pieces(begin: int, end: int) -> Iterator[slice]:
    """Yield slices that divide `begin` to `end` into pieces."""
    return (slice(at, min(at + PIECE, end)) for at in range(begin, end, PIECE))


class VectorFile:
    """A float32 vector, shape (numel,), in a file without a name, zero at first. Forked processes share it.

    Raises:
        OSError: the folder for temporary files is not writable, or its disk is full. Any method may raise it.
    """

    def __init__(self, numel: int) -> None:
        with tempfile.TemporaryFile(prefix="doll-", buffering=0) as file:
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._numel = numel
        os.ftruncate(self._fd, 4 * numel)

    def read(self, at: int, into: torch.Tensor) -> None:
        """Copy the values from position `at` into `into`, float32, shape (n,), on any device."""
        for part in pieces(0, len(into)):
            if into.device.type == "cpu":
                self._read(at + part.start, into[part].numpy())
            else:
                piece = np.empty(part.stop - part.start, np.float32)
                self._read(at + part.start, piece)
                into[part].copy_(torch.from_numpy(piece))

    def write(self, at: int, values: torch.Tensor) -> None:
        """Copy `values`, float32, shape (n,), on any device, to position `at`. If the file is too short, it grows."""
        for part in pieces(0, len(values)):
            view = values[part].cpu().numpy().view(np.uint8).data
            offset = 4 * (at + part.start)
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written

    def mapped(self) -> npt.NDArray[np.float32]:
        """Return the vector as an array that shares the pages of the file."""
        if not self._numel:
            return np.zeros(0, np.float32)
        return np.frombuffer(mmap.mmap(self._fd, 4 * self._numel), np.float32)

    def _read(self, at: int, into: npt.NDArray[np.float32]) -> None:
        view, offset = into.view(np.uint8).data, 4 * at
        while view:
            count = os.preadv(self._fd, [view], offset)
            if not count:
                raise OSError(f"expected {len(view)} bytes at {offset} of a stage's file, which ends there")
            view, offset = view[count:], offset + count


class WritableVector(Protocol):
    """A vector of the whole model, of which a stage writes its ranges."""

    def write(self, at: int, values: torch.Tensor) -> None:
        """Copy `values`, float32, shape (n,), on any device, to position `at`."""


class Vectors(Protocol):
    """Vectors of equal length, by number. Each is written before it is read."""

    def write(self, number: int, at: int, values: torch.Tensor) -> None:
        """Copy `values`, float32, shape (n,), to position `at` of vector `number`."""

    def read(self, number: int, at: int, into: torch.Tensor) -> None:
        """Copy the values from position `at` of vector `number` into `into`, float32, shape (n,)."""

    def free(self, number: int) -> None:
        """Free vector `number`: it is not read again before it is written."""


class VectorsInMemory:
    """`Vectors` in the memory of a stage's device."""

    def __init__(self, numel: int, device: str) -> None:
        self._numel, self._device = numel, device
        self._vectors: dict[int, torch.Tensor] = {}

    def write(self, number: int, at: int, values: torch.Tensor) -> None:
        if number not in self._vectors:
            self._vectors[number] = torch.empty(self._numel, dtype=torch.float32, device=self._device)
        self._vectors[number][at : at + len(values)] = values

    def read(self, number: int, at: int, into: torch.Tensor) -> None:
        into.copy_(self._vectors[number][at : at + len(into)])

    def free(self, number: int) -> None:
        self._vectors.pop(number, None)


class VectorsInFile:
    """`Vectors` in a file."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._file = VectorFile(0)

    def write(self, number: int, at: int, values: torch.Tensor) -> None:
        self._file.write(number * self._numel + at, values)

    def read(self, number: int, at: int, into: torch.Tensor) -> None:
        self._file.read(number * self._numel + at, into)

    def free(self, number: int) -> None:
        """Do nothing: the next vector with this number overwrites the old one."""
