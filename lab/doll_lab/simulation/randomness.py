"""Random times, drawn in blocks, because one call to numpy takes as long as a hundred of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

_BLOCK = 4096

Draw = Callable[[], float]


def blocks(sample: Callable[[int], npt.NDArray[np.float64]]) -> Draw:
    """Return a function that returns one number per call, from blocks that `sample(size)` makes."""

    def numbers() -> Iterator[float]:
        while True:
            yield from sample(_BLOCK).tolist()

    return numbers().__next__


def samples_time(rng: np.random.Generator, num_samples: float, scv: float) -> Draw:
    """Return draws of the time in which `num_samples` arrive, in units of the mean time between two samples.

    The sum of Gamma times between samples is Gamma: for Poisson arrivals (scv 1), the time of b samples is Erlang(b),
    which is drawn as one number.

    Args:
        scv: squared coefficient of variation of the time between samples; 0: regular arrivals.
    """
    if scv == 0.0:
        return lambda: num_samples
    return blocks(lambda size: rng.standard_gamma(num_samples / scv, size) * scv)


def compute_time(rng: np.random.Generator, mean_s: float, distribution: str) -> Draw:
    """Return draws of the seconds for one gradient; `distribution`: `exponential` or `constant`."""
    if distribution == "constant" or mean_s == 0.0:
        return lambda: mean_s
    return blocks(lambda size: rng.standard_exponential(size) * mean_s)
