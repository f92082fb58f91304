"""Ratings as products of factors: matrix factorization by SGD, and probabilistic matrix factorization (PMF).

The prediction is u . v of a user's and an item's vector. SGD on the squared error e**2, with the penalty
`regularization (|u|**2 + |v|**2)` on what a rating touches, makes the steps of ESSP (Dai et al.: High-Performance
Distributed ML at Scale through Parameter Server Consistency Models, 2015), times 2:

    u += 2 lr (e v - regularization u),    v += 2 lr (e u - regularization v)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from doll import Sample, Task
from doll.errors import BadRecordsError, SampleError
from doll.producers.sources import ratings
from torch import nn


class MatrixFactorization(Task):
    """Ratings by the product of a user's and an item's vector.

    Records are packed ones (`doll.producers.sources.ratings`) or MovieLens' lines. A sample's x is int32: user, item.
    The reported loss is the mean squared error, without the penalty: its root is the RMSE.

    Args:
        users: their numbers are 0 .. users - 1.
        items: as users.
        rank: numbers in each vector.
        regularization: of the penalty; it has a gradient only for the vectors of a batch, once for each rating.
        deviation: standard deviation of the first vectors.
        sparse: whether the gradients of the tables hold only the rows that a batch has.
    """

    input_shape = (2,)
    biases = False
    mean = 0.0

    def __init__(
        self,
        users: int,
        items: int,
        rank: int = 5,
        regularization: float = 0.0,
        deviation: float = 0.3,
        sparse: bool = False,
    ) -> None:
        if not (0 < users <= ratings.HIGHEST_ID and 0 < items <= ratings.HIGHEST_ID and rank > 0):
            raise ValueError(f"expected users, items and rank above 0, got {users}, {items} and {rank}")
        if not (regularization >= 0 and deviation > 0):
            raise ValueError(f"expected regularization >= 0 and deviation > 0, got {regularization} and {deviation}")
        self.users = users
        self.items = items
        self.rank = rank
        self.regularization = regularization
        self.deviation = deviation
        self.sparse = sparse

    def build_model(self) -> nn.Module:
        return Factors(
            self.users, self.items, self.rank, biases=self.biases, mean=self.mean, deviation=self.deviation,
            sparse=self.sparse,
        )  # fmt: skip

    def decode(self, record: bytes) -> Sample:
        user, item, rating = ratings.parse(record)
        for what, number, count in (("user", user, self.users), ("item", item, self.items)):
            if number >= count:
                raise SampleError(f"expected {what} 0 to {count - 1} (task.args.{what}s), got {number}")
        return Sample(np.array([user, item], np.int32), np.float32(rating))

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        if width != ratings.RECORD.itemsize:
            return None
        rows = np.frombuffer(block, ratings.RECORD)
        return self._samples(rows) if self._good(rows).all() else None  # `decode` says what is wrong

    def decode_many(self, values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        packed, bad = [], []
        for at, value in enumerate(values):
            try:
                packed.append(ratings.pack(*ratings.parse(value)))
            except SampleError:
                bad.append(at)
        if bad:
            raise BadRecordsError(bad)
        rows = np.frombuffer(b"".join(packed), ratings.RECORD)
        if not (good := self._good(rows)).all():
            raise BadRecordsError(np.flatnonzero(~good))
        return self._samples(rows)

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Shape (n, 2): the prediction, and what the penalty of the rating is made of."""
        output: torch.Tensor = model(x)
        return output

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error = _squared_error(output, target)
        if not self.regularization:
            return error
        penalty = self.regularization * output[:, 1].mean()
        # Its gradient alone: the loss that is reported, compared with a goal and plotted is that of the ratings.
        return error + (penalty - penalty.detach())

    def predict(self, output: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"rating": output[:, 0]}

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"squared_error": float(_squared_error(output, target))}

    def _good(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        good: npt.NDArray[np.bool_] = (
            (rows["tag"] == 0)
            & (rows["user"] < self.users)
            & (rows["item"] < self.items)
            & (np.abs(rows["rating"]) <= ratings.LARGEST_RATING)
        )
        return good

    def _samples(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        x = np.empty((len(rows), 2), np.int32)
        x[:, 0], x[:, 1] = rows["user"], rows["item"]
        return x, rows["rating"].astype(np.float32)


class Pmf(MatrixFactorization):
    """Probabilistic matrix factorization (Salakhutdinov, Mnih, 2007), of rank 20 as MLLess learns it.

    Args:
        users, items, rank, regularization, deviation, sparse: as in `MatrixFactorization`.
        biases: learn a bias for each user and item too.
        mean: of the ratings; the products explain what differs from it.
        ratings_path: file of the ratings; some of them are held out. None: no held-out set.
        header: the first line of that file is a header.
        holdout_one_in: one rating of so many is held out. Set `source.holdout_one_in` to the same, or the stream has
            them too.
        holdout_samples: the first so many of them.
    """

    def __init__(
        self,
        users: int,
        items: int,
        rank: int = 20,
        regularization: float = 0.02,
        deviation: float = 0.1,
        sparse: bool = False,
        biases: bool = False,
        mean: float = 0.0,
        ratings_path: str | None = None,
        header: bool = False,
        holdout_one_in: int = 10,
        holdout_samples: int = 10_000,
    ) -> None:
        super().__init__(users, items, rank, regularization, deviation, sparse)
        if not (abs(mean) <= ratings.LARGEST_RATING and holdout_one_in > 1 and holdout_samples > 0):
            raise ValueError(
                "expected a finite mean, holdout_one_in above 1 and holdout_samples above 0, got "
                f"{mean}, {holdout_one_in} and {holdout_samples}"
            )
        self.biases = biases
        self.mean = mean
        self.ratings_path = ratings_path
        self.header = header
        self.holdout_one_in = holdout_one_in
        self.holdout_samples = holdout_samples

    def holdout(self) -> Iterable[Sample]:
        if self.ratings_path is None:
            return ()
        held_out = ratings.read_held_out(
            Path(self.ratings_path), self.holdout_one_in, header=self.header, limit=self.holdout_samples
        )
        return [self.decode(ratings.pack(*rating)) for rating in held_out]


class Factors(nn.Module):
    """Products of a vector for each user and a vector for each item, with biases or without."""

    def __init__(
        self, users: int, items: int, rank: int, *, biases: bool, mean: float, deviation: float, sparse: bool
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(users, rank, sparse=sparse)
        self.items = nn.Embedding(items, rank, sparse=sparse)
        nn.init.normal_(self.users.weight, std=deviation)
        nn.init.normal_(self.items.weight, std=deviation)
        self.user_biases = nn.Embedding(users, 1, sparse=sparse) if biases else None
        self.item_biases = nn.Embedding(items, 1, sparse=sparse) if biases else None
        for table in (self.user_biases, self.item_biases):
            if table is not None:
                nn.init.zeros_(table.weight)
        self.mean = mean

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Shape (n, 2): prediction, and the sum of the squares of the parameters that it is made of.

        Args:
            ids: user and item, integers of shape (n, 2).
        """
        parts = [self.users(ids[:, 0]), self.items(ids[:, 1])]
        prediction = (parts[0] * parts[1]).sum(1) + self.mean
        if self.user_biases is not None and self.item_biases is not None:
            biases = [self.user_biases(ids[:, 0]), self.item_biases(ids[:, 1])]
            prediction = prediction + (biases[0] + biases[1]).squeeze(1)
            parts += biases
        return torch.stack([prediction, sum(((part * part).sum(1) for part in parts), torch.zeros(()))], dim=1)


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[:, 0], target.to(output.dtype))
