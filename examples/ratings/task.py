"""Ratings as products of factors: matrix factorization by SGD, and probabilistic matrix factorization (PMF).

The prediction is the product u . v of a user's and an item's vector. SGD on the squared error e**2, with the penalty
`regularization (|u|**2 + |v|**2)` on the vectors of a rating, makes the steps of ESSP (Dai et al.: High-Performance
Distributed ML at Scale through Parameter Server Consistency Models, 2015), times 2:

    u += 2 lr (e v - regularization u),    v += 2 lr (e u - regularization v)

A line of MovieLens has a user's number, an item's number and a rating, followed by any other cells; the separator is a
comma (`ratings.csv`), a tab (`u.data`) or `::` (`ratings.dat`). The packed record is `RECORD`, 13 bytes; its first byte
is 0, which no text has.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from doll import Sample, Task
from doll.errors import BadRecordsError, ConfigError, SampleError
from doll.producers.sources import Stream
from doll.records import lines as line_files
from doll.task.records import values_of
from torch import nn

HIGHEST_ID: Final = 2**31 - 1
LARGEST_RATING: Final = 1e6
RECORD: Final = np.dtype([("tag", "u1"), ("user", "<u4"), ("item", "<u4"), ("rating", "<f4")])

_PACKED: Final = struct.Struct("<BIIf")
_SEPARATOR: Final = re.compile(rb"::|[,\t]")
_ID: Final = re.compile(rb"[0-9]{1,10}")
_SHOWN: Final = 40  # number of bytes of a cell in an error message
_BLOCK: Final = 1024


class MatrixFactorization(Task):
    """Predicts ratings as products of a user's and an item's vector.

    Records are packed records (`RECORD`) or MovieLens' lines. x of a sample: user, item, int32.
    The reported loss is the mean squared error without the penalty; its root is the RMSE.

    Args:
        users: number of users, with the ids 0 .. users - 1.
        items: number of items, with the ids 0 .. items - 1.
        rank: number of elements of each vector.
        regularization: factor of the penalty; it has a gradient only for the vectors of a batch, once for each rating.
        deviation: standard deviation of the initial vectors.
        sparse: whether the gradients of the tables hold only the rows that a batch uses.
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
        if not (0 < users <= HIGHEST_ID and 0 < items <= HIGHEST_ID and rank > 0):
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
        user, item, rating = parse(record)
        for what, number, count in (("user", user, self.users), ("item", item, self.items)):
            if number >= count:
                raise SampleError(f"expected {what} 0 to {count - 1} (task.args.{what}s), got {number}")
        return Sample(np.array([user, item], np.int32), np.float32(rating))

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        if width != RECORD.itemsize:
            return None
        rows = np.frombuffer(block, RECORD)
        return self._samples(rows) if self._good(rows).all() else None  # `decode` reports the error

    def decode_many(self, values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        packed, bad = [], []
        for at, value in enumerate(values):
            try:
                packed.append(pack(*parse(value)))
            except SampleError:
                bad.append(at)
        if bad:
            raise BadRecordsError(bad)
        rows = np.frombuffer(b"".join(packed), RECORD)
        if not (good := self._good(rows)).all():
            raise BadRecordsError(np.flatnonzero(~good))
        return self._samples(rows)

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return, shape (n, 2), the prediction and the sum of squares for the penalty of the rating."""
        output: torch.Tensor = model(x)
        return output

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error = _squared_error(output, target)
        if not self.regularization:
            return error
        penalty = self.regularization * output[:, 1].mean()
        # Only the gradient of the penalty: the reported, plotted and compared loss is that of the ratings.
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
            & (np.abs(rows["rating"]) <= LARGEST_RATING)
        )
        return good

    def _samples(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        x = np.empty((len(rows), 2), np.int32)
        x[:, 0], x[:, 1] = rows["user"], rows["item"]
        return x, rows["rating"].astype(np.float32)


class Pmf(MatrixFactorization):
    """Probabilistic matrix factorization (Salakhutdinov, Mnih, 2007), with rank 20 as in MLLess.

    Args:
        users, items, rank, regularization, deviation, sparse: as in `MatrixFactorization`.
        biases: whether to learn also a bias for each user and item.
        mean: mean of the ratings; the products explain the difference from it.
        ratings_path: file of the ratings; some of them are held out. None: no held-out set.
        header: whether the first line of this file is a header.
        holdout_one_in: one rating of this number is held out. Set `source.args.holdout_one_in` to the same number, or
            the stream has the held-out ratings, too.
        holdout_samples: maximum number of held-out ratings.
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
        if not (abs(mean) <= LARGEST_RATING and holdout_one_in > 1 and holdout_samples > 0):
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
        held_out = read_held_out(
            Path(self.ratings_path), self.holdout_one_in, header=self.header, limit=self.holdout_samples
        )
        return [self.decode(pack(*rating)) for rating in held_out]


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
        """Return, shape (n, 2), the prediction and the sum of the squares of the parameters that it uses.

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


# --- MovieLens' lines and packed records


def pack(user: int, item: int, rating: float) -> bytes:
    """Return the packed record of a rating."""
    return _PACKED.pack(0, user, item, rating)


def parse(record: bytes) -> tuple[int, int, float]:
    """Return user, item and rating of a packed record or of a line.

    Raises:
        SampleError: the record is neither, an id is not a number, or the rating is not a finite number of valid size.
    """
    if record[:1] == b"\0":
        if len(record) != RECORD.itemsize:
            raise SampleError(f"expected a packed rating of {RECORD.itemsize} bytes, got {len(record)}")
        _, user, item, rating = _PACKED.unpack(record)
    else:
        cells = _SEPARATOR.split(record.rstrip(b"\r\n"))
        if len(cells) < 3:
            raise SampleError(
                f"expected a packed rating of {RECORD.itemsize} bytes, or a line of user, item and rating with commas, "
                f"tabs or :: between; got {record[:_SHOWN]!r}"
            )
        user, item = _id(cells[0], "user"), _id(cells[1], "item")
        rating = _number(cells[2])
    if not abs(rating) <= LARGEST_RATING:  # a NaN is not, either
        raise SampleError(f"expected a rating of -{LARGEST_RATING:g} to {LARGEST_RATING:g}, got {rating}")
    return user, item, rating


def _id(cell: bytes, what: str) -> int:
    if _ID.fullmatch(cell) is None or (number := int(cell)) > HIGHEST_ID:
        raise SampleError(f"expected the number of the {what}, 0 to {HIGHEST_ID}, got {cell[:_SHOWN]!r}")
    return number


def _number(cell: bytes) -> float:
    try:
        return float(cell)
    except ValueError:
        raise SampleError(f"expected a number as rating, got {cell[:_SHOWN]!r}") from None


def is_held_out(user: int, item: int, one_in: int) -> bool:
    """Return whether a rating is held out, one of `one_in`. Only user and item decide, whatever order or process it is.

    If `one_in` is 0, no rating is held out.
    """
    if not one_in:
        return False
    mixed = (user * 0x9E3779B97F4A7C15 + item * 0xC2B2AE3D27D4EB4F) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (mixed >> 32) % one_in == 0


def records(lines: Iterable[bytes], one_in: int, *, held_out: bool = False) -> Iterator[bytes]:
    """Yield the packed records of these lines in order, without the held-out ones. `held_out`: yield only these.

    A line that is not a rating becomes a record without changes, unless `held_out`: a worker refuses it, and stores it
    as a dead letter.
    """
    for line in lines:
        try:
            user, item, rating = parse(line)
        except SampleError:
            if not held_out:
                yield line
            continue
        if is_held_out(user, item, one_in) == held_out:
            yield pack(user, item, rating)


def read_held_out(path: Path, one_in: int, *, header: bool, limit: int) -> list[tuple[int, int, float]]:
    """Return the first `limit` held-out ratings of a file.

    Raises:
        ConfigError: the file cannot be read, or has no ratings.
    """
    kept = records(line_files.read_file(path, header=header), one_in, held_out=True)
    ratings = [parse(record) for record in itertools.islice(kept, limit)]
    if not ratings:
        raise ConfigError(f"{path}: expected ratings that are held out (one in {one_in}), got none")
    return ratings


def shuffled(
    values: Sequence[bytes], first: int, step: int, rng_of: Callable[[int], np.random.Generator], *, repeat: bool
) -> Iterator[bytes]:
    """Yield every `step`-th of `values` from place `first` on, in another random order in each pass.

    Args:
        first: first place, counted over all passes.
        rng_of: function that returns the generator of pass 0, 1, ...; streams with equal generators share the values.
        repeat: whether to begin another pass at the end.
    """
    place, count = first, len(values)
    while repeat or place < count:
        number, begin = divmod(place, count)
        order = rng_of(number).permutation(count)
        for at in range(begin, count, step):
            yield values[order[at]]
            place += step


@dataclass(frozen=True)
class ObservedRatings:
    """Made-up ratings: a fixed set of pairs of user and item, each with its rating.

    Attributes:
        users, items: int64, shape (n,).
        ratings: float32, shape (n,).
    """

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    ratings: npt.NDArray[np.float32]


def observe(
    users: int, items: int, rank: int, noise: float, observed: float, rng: np.random.Generator
) -> ObservedRatings:
    """Return ratings that are products of factors, plus noise.

    A rating is the product of two vectors of `rank` numbers, each normal with variance 1 / rank, plus a normal number
    of standard deviation `noise`, which is the lowest error (RMSE) that factors of this rank reach on new pairs.

    Args:
        observed: share of the pairs of user and item that are rated.
    """
    of_user, of_item = (rng.normal(0.0, 1.0 / math.sqrt(rank), (number, rank)) for number in (users, items))
    count = max(1, round(observed * users * items))
    pairs = rng.choice(users * items, count, replace=False, shuffle=False)
    rows, columns = np.divmod(pairs, items)
    ratings = np.einsum("nr,nr->n", of_user[rows], of_item[columns]) + rng.normal(0.0, noise, count)
    return ObservedRatings(rows, columns, ratings.astype(np.float32))


def drawn(observed: ObservedRatings, stream: int, streams: int, rng: np.random.Generator) -> Iterator[bytes]:
    """Yield packed records endlessly: each is drawn from the stream's share of the ratings, with replacement.

    Raises:
        ConfigError: the stream's share is empty.
    """
    rows = np.zeros(len(observed.users), RECORD)
    rows["user"], rows["item"], rows["rating"] = observed.users, observed.items, observed.ratings
    own = rows[stream::streams]
    if not len(own):
        raise ConfigError(f"source: expected at least a rating for each of {streams} streams, got {len(rows)}")
    blocks = (own[rng.integers(len(own), size=_BLOCK)] for _ in itertools.count())
    return itertools.chain.from_iterable(map(values_of, blocks))


# --- the stream (`source.of` of the job file)


def made_up(
    stream: Stream, users: int = 300, items: int = 200, rank: int = 5, noise: float = 0.1, observed: float = 0.2
) -> Iterator[bytes]:
    """Yield a fixed set of ratings, drawn with replacement; the arguments are those of `observe`."""
    rated = observe(users, items, rank, noise, observed, stream.shared_rng())
    return drawn(rated, stream.number, stream.count, stream.rng())


def from_file(
    stream: Stream,
    ratings_path: str,
    header: bool = False,
    shuffle: bool = True,
    repeat: bool = False,
    holdout_one_in: int = 0,
) -> Iterator[bytes]:
    """Yield the ratings of a file of MovieLens (`ratings.csv`, `ratings.dat`, `u.data`).

    Args:
        ratings_path: the file.
        header: whether the first line is a header instead of a rating.
        shuffle: whether to use a random order of the whole file, which is read into memory; False: the file's order.
        repeat: whether to begin again at the end of the file, in another random order.
        holdout_one_in: one rating of this number is left out, for a held-out set; 0: none.
    """
    path, longest = Path(ratings_path), stream.max_record_bytes
    if not shuffle:
        read = line_files.read_file(path, header=header, repeat=repeat, max_bytes=longest)
        return itertools.islice(records(read, holdout_one_in), stream.number, None, stream.count)
    values = _all_records(path, header, holdout_one_in, longest)
    if not values:
        raise ConfigError(f"holdout_one_in: expected ratings of {path} that are not held out, got none")
    return shuffled(values, stream.number, stream.count, stream.order_rng, repeat=repeat)


@cache
def _all_records(path: Path, header: bool, holdout_one_in: int, longest: int) -> list[bytes]:
    """Return the records of the file: the same list for all streams of a job."""
    return list(records(line_files.read_file(path, header=header, max_bytes=longest), holdout_one_in))
