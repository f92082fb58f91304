"""Contributions in 16 bits with error feedback: the rounding error of one contribution is added to the next one.

Seide et al., 1-bit stochastic gradient descent (Interspeech 2014); Karimireddy et al., Error feedback fixes SignSGD
(ICML 2019). The error belongs to the worker's process: no checkpoint contains the error, and it is lost with the
process. If a contribution is refused and its batches are computed again, the error is not reset. In both cases, at most
the rounding error of one contribution is lost or counted twice.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from doll.storage.sections import RoundedVector

_LARGEST: Final = 15  # numbers of float16 are below 2 ** 16; one bit is left for rounding up


class ErrorFeedback:
    """The error feedback of one worker. Not thread-safe: one thread computes."""

    def __init__(self, form: Literal["bf16", "fp16"]) -> None:
        self._form = form
        self._error: torch.Tensor | None = None

    def round(self, values: npt.NDArray[np.float32]) -> RoundedVector | None:
        """Add the present error to `values`, shape (numel,), and return the rounded sum. Return None if a number is not
        finite. The caller sends such a contribution unrounded, and the server refuses it."""
        wanted = torch.from_numpy(np.array(values))
        if self._error is not None:
            wanted += self._error
        largest = float(wanted.abs().max()) if len(wanted) else 0.0
        if not math.isfinite(largest):
            return None
        if self._form == "bf16":
            exponent, rounded = None, wanted.to(torch.bfloat16).to(torch.float32)
        else:
            # A power of two, so that scaling does not round.
            exponent = math.frexp(largest)[1] - _LARGEST if largest else 0
            scaled = torch.ldexp(wanted, torch.tensor(-exponent)).to(torch.float16)
            rounded = torch.ldexp(scaled.to(torch.float32), torch.tensor(exponent))
        if not bool(torch.isfinite(rounded).all()):
            return None
        self._error = wanted - rounded
        return RoundedVector(rounded.numpy(), exponent)
