"""Matrix factorisation on drawn ratings, in numpy: the problem of MLLess's and of ESSP's figures. Pure.

The parameters are one flat vector: the row factors, then the column factors, each row-major.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Factorization:
    """Observed entries of a matrix of low rank, and the gradients of factors that fit it.

    Attributes:
        rows, cols: of the matrix.
        rank: of the truth and of the factors that are learned.
        row, col: of the observed entries, shape (entries,), in random order.
        value: of the observed entries, noise included, shape (entries,).
    """

    rows: int
    cols: int
    rank: int
    row: Ints
    col: Ints
    value: Floats

    @property
    def num_parameters(self) -> int:
        return (self.rows + self.cols) * self.rank

    def start(self, spread: float, rng: np.random.Generator) -> Floats:
        """First parameters: N(0, spread²), shape (num_parameters,)."""
        return rng.normal(0.0, spread, self.num_parameters)

    def shards(self, num_workers: int) -> list[Ints]:
        """The entries of each worker, as indexes: equal parts, and in random order as the entries are."""
        return np.array_split(np.arange(len(self.value)), num_workers)

    def factors(self, parameters: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.floating], ...]:
        """Views of the row factors, shape (rows, rank), and of the column factors, shape (cols, rank)."""
        at = self.rows * self.rank
        return parameters[:at].reshape(self.rows, self.rank), parameters[at:].reshape(self.cols, self.rank)

    def errors(self, parameters: npt.NDArray[np.floating], picked: Ints | slice = slice(None)) -> Floats:
        """Value less prediction of these entries, shape (picked,)."""
        left, right = self.factors(parameters)
        predicted = np.einsum("nr,nr->n", left[self.row[picked]], right[self.col[picked]])
        errors: Floats = self.value[picked] - predicted
        return errors

    def mse(self, parameters: npt.NDArray[np.floating]) -> float:
        """Mean squared error of all observed entries; infinite where the parameters have diverged."""
        with np.errstate(over="ignore", invalid="ignore"):
            mse = float(np.mean(self.errors(parameters) ** 2))
        return mse if np.isfinite(mse) else float("inf")

    def gradient(self, parameters: npt.NDArray[np.floating], picked: Ints) -> tuple[Floats, float]:
        """Sum over these entries of the gradient of error² / 2, shape (num_parameters,); their mean squared error."""
        with np.errstate(over="ignore", invalid="ignore"):
            left, right = self.factors(parameters)
            row, col, error = self.row[picked], self.col[picked], self.errors(parameters, picked)
            gradient = np.zeros(self.num_parameters)
            of_left, of_right = self.factors(gradient)
            np.add.at(of_left, row, -error[:, None] * right[col])
            np.add.at(of_right, col, -error[:, None] * left[row])
            return gradient, float(np.mean(error**2))


def low_rank(
    rows: int, cols: int, rank: int, observed_share: float, noise: float, rng: np.random.Generator
) -> Factorization:
    """The product of two factors N(0, 1), over √rank, with noise N(0, noise²), of which a share is observed.

    The entries have the variance 1 + noise².
    """
    left, right = rng.normal(0.0, rank**-0.25, (rows, rank)), rng.normal(0.0, rank**-0.25, (cols, rank))
    picked = rng.permutation(rows * cols)[: round(observed_share * rows * cols)]
    row, col = picked // cols, picked % cols
    value = np.einsum("nr,nr->n", left[row], right[col]) + noise * rng.standard_normal(len(picked))
    return Factorization(rows, cols, rank, row, col, value)
