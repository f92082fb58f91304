"""The sparse tasks' algorithms without DOLL: one process, numpy, float64. References for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class PlainLogistic:
    """Logistic regression on numbers and hashed categories, a batch at a time.

    Attributes:
        table: weight of each column, shape (columns,).
        dense: weights of the numbers, then the bias, shape (numbers + 1,).
    """

    def __init__(self, columns: int, numbers: int) -> None:
        self.table = np.zeros(columns)
        self.dense = np.zeros(numbers + 1)

    def gradient(self, numbers: Array, ids: Array, y: Array) -> tuple[Array, Array, Array]:
        """Gradients of the mean log-loss by `table` and `dense`, and the log-loss of each sample, shape (n,).

        Args:
            numbers: shape (n, numbers).
            ids: columns, shape (n, k).
            y: 0 or 1, shape (n,).
        """
        rows = np.column_stack([numbers, np.ones(len(y))]).astype(np.float64)
        logits = rows @ self.dense + self.table[ids].sum(axis=1)
        error = (1.0 / (1.0 + np.exp(-logits)) - y) / len(y)
        of_table = np.zeros_like(self.table)
        np.add.at(of_table, ids, error[:, None])
        return of_table, rows.T @ error, np.logaddexp(0.0, logits) - y * logits

    def learn(self, numbers: Array, ids: Array, y: Array, lr: float) -> float:
        """A step of SGD; the mean log-loss before it."""
        of_table, of_dense, losses = self.gradient(numbers, ids, y)
        self.table -= lr * of_table
        self.dense -= lr * of_dense
        return float(losses.mean())


class PlainFactors:
    """Ratings as products of factors, with a penalty on what a rating touches.

    Attributes:
        users, items: vectors, shape (users, rank) and (items, rank).
        user_biases, item_biases: shape (users,) and (items,); all 0 and kept so without biases.
    """

    def __init__(
        self, users: Array, items: Array, *, regularization: float = 0.0, biases: bool = False, mean: float = 0.0
    ) -> None:
        self.users, self.items = users.astype(np.float64), items.astype(np.float64)
        self.user_biases, self.item_biases = np.zeros(len(users)), np.zeros(len(items))
        self._regularization = regularization
        self._biases = biases
        self._mean = mean

    def predict(self, ids: Array) -> Array:
        """Shape (n,), of user and item, shape (n, 2)."""
        user, item = ids[:, 0], ids[:, 1]
        products = (self.users[user] * self.items[item]).sum(axis=1)
        predictions: Array = products + self._mean + self.user_biases[user] + self.item_biases[item]
        return predictions

    def gradient(self, ids: Array, ratings: Array) -> dict[str, Array]:
        """Gradients of the mean squared error and of the mean penalty, by the name of the attribute."""
        user, item = ids[:, 0], ids[:, 1]
        error, share = self.predict(ids) - ratings, 2.0 / len(ratings)
        gradients = {name: np.zeros_like(getattr(self, name)) for name in self._names}
        own = self._regularization
        np.add.at(gradients["users"], user, share * (error[:, None] * self.items[item] + own * self.users[user]))
        np.add.at(gradients["items"], item, share * (error[:, None] * self.users[user] + own * self.items[item]))
        if self._biases:
            np.add.at(gradients["user_biases"], user, share * (error + own * self.user_biases[user]))
            np.add.at(gradients["item_biases"], item, share * (error + own * self.item_biases[item]))
        return gradients

    def learn(self, ids: Array, ratings: Array, lr: float) -> float:
        """A step of SGD; the mean squared error before it."""
        before = float(((self.predict(ids) - ratings) ** 2).mean())
        for name, gradient in self.gradient(ids, ratings).items():
            getattr(self, name)[:] -= lr * gradient
        return before

    @property
    def _names(self) -> tuple[str, ...]:
        return ("users", "items", "user_biases", "item_biases") if self._biases else ("users", "items")
