"""Length of a float32 vector of any size."""

from __future__ import annotations

import math

import torch


def square_length(vector: torch.Tensor) -> float:
    """Sum of the squares of a float32 vector; infinite where a number of it is not finite."""
    square = float(torch.dot(vector, vector))
    if 1e-30 < square < math.inf:
        return square
    # Squares that float32 cannot hold, or what is not finite.
    exact = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    return exact**2 if math.isfinite(exact) else math.inf


def length(vector: torch.Tensor) -> float:
    """Euclidean norm of a float32 vector; infinite where a number of it is not finite."""
    return math.sqrt(square_length(vector))
