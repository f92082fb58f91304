"""The layout of a model's vector of weights: the tensors and their parts of the vector. Pure.

Every checkpoint contains it, so that the weights can be read by name without the code that made the model.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt


class WeightsLayout(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of `FlatModel.flat`, in their order.

    Attributes:
        floats: name and shape of each trainable parameter, then of each float buffer.
        others: name, shape and torch's dtype name of each other buffer; each begins at an even index.
    """

    floats: tuple[tuple[str, tuple[int, ...]], ...] = ()
    others: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    def tensors(self, weights: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors by name, as views into `weights`. Raises ValueError if `weights` has another length than
        the layout, or if a dtype is not known here."""
        named: dict[str, npt.NDArray[Any]] = {}
        at = 0
        for name, shape in self.floats:
            size = math.prod(shape)
            named[name] = weights[at : at + size].reshape(shape)
            at += size
        for name, shape, kind in self.others:
            at = round_up_to_even(at)
            try:
                dtype = np.dtype(kind.removeprefix("torch."))
            except TypeError as exc:
                raise ValueError(f"{name}: no type {kind!r} here") from exc
            size_bytes = math.prod(shape) * dtype.itemsize
            words = -(-size_bytes // 4)
            named[name] = weights[at : at + words].view(np.uint8)[:size_bytes].view(dtype).reshape(shape)
            at += words
        if (round_up_to_even(at) if self.others else at) != len(weights):
            raise ValueError(f"expected {at} numbers, got {len(weights)}")
        return named


NO_LAYOUT: Final = WeightsLayout()
"""The layout of a checkpoint that does not name its tensors."""


def round_up_to_even(number: int) -> int:
    # Values of 8 bytes must begin at a multiple of 8 bytes.
    return number + number % 2
