"""Argument checks that the theory functions share. An invalid number raises a `ValueError` that names the argument."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def positive(**values: float) -> None:
    """Raise `ValueError` for the first value that is not a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: expected a number above 0, got {value}")


def non_negative(**values: float) -> None:
    """Raise `ValueError` for the first value that is not a finite number of at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: expected a number of at least 0, got {value}")


def fraction(**values: float) -> None:
    """Raise `ValueError` for the first value outside [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a number in [0, 1], got {value}")


def rates(rates_per_s: npt.ArrayLike) -> Floats:
    """Return arrival rates as a float64 array of shape (N,), N >= 1.

    Raises:
        ValueError: the shape is not (N,), a rate is negative or not finite, or no rate is above 0.
    """
    values = np.atleast_1d(np.asarray(rates_per_s, dtype=np.float64))
    if values.ndim != 1 or not values.size:
        raise ValueError(f"rates_per_s: expected one rate per worker, got shape {values.shape}")
    # The minimum and the sum also reveal NaN and infinity, so two passes are enough.
    if not (values.min() >= 0 and (total := values.sum()) > 0 and math.isfinite(total)):
        raise ValueError("rates_per_s: expected finite rates of at least 0, one above 0")
    return values
