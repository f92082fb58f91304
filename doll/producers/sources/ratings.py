"""Ratings of items by users: the lines of MovieLens' files, their packed records, and made-up ratings of known factors.

A line has a user's number, an item's number and a rating, then anything: with commas between (`ratings.csv`), tabs
(`u.data`) or `::` (`ratings.dat`). The packed record is `RECORD`, 13 bytes; its first byte is 0, as in no text.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError, SampleError
from doll.producers.sources.images import values_of
from doll.records import lines as line_files

HIGHEST_ID: Final = 2**31 - 1
LARGEST_RATING: Final = 1e6
RECORD: Final = np.dtype([("tag", "u1"), ("user", "<u4"), ("item", "<u4"), ("rating", "<f4")])

_PACKED: Final = struct.Struct("<BIIf")
_SEPARATOR: Final = re.compile(rb"::|[,\t]")
_ID: Final = re.compile(rb"[0-9]{1,10}")
_SHOWN: Final = 40  # bytes of a cell in an error message
_BLOCK: Final = 1024


def pack(user: int, item: int, rating: float) -> bytes:
    """The packed record of a rating."""
    return _PACKED.pack(0, user, item, rating)


def parse(record: bytes) -> tuple[int, int, float]:
    """User, item and rating of a packed record or of a line.

    Raises:
        SampleError: it is neither, an id is not a number, or the rating is not a finite number of reasonable size.
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
    """Whether a rating is held out, one in `one_in` of them: by user and item, so in every order and every process.

    0: none is.
    """
    if not one_in:
        return False
    mixed = (user * 0x9E3779B97F4A7C15 + item * 0xC2B2AE3D27D4EB4F) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (mixed >> 32) % one_in == 0


def records(lines: Iterable[bytes], one_in: int, *, held_out: bool = False) -> Iterator[bytes]:
    """The packed records of these lines, in order, without those held out, or of those alone.

    A line that is no rating is a record as it is, unless `held_out`: a worker refuses it, and it is kept as a dead
    letter.
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
    """The first `limit` held-out ratings of a file.

    Raises:
        ConfigError: it cannot be read, or has no ratings.
    """
    kept = records(line_files.read_file(path, header=header), one_in, held_out=True)
    ratings = [parse(record) for record in itertools.islice(kept, limit)]
    if not ratings:
        raise ConfigError(f"{path}: expected ratings that are held out (one in {one_in}), got none")
    return ratings


def shuffled(
    values: Sequence[bytes], first: int, step: int, rng_of: Callable[[int], np.random.Generator], *, repeat: bool
) -> Iterator[bytes]:
    """Every `step`-th of `values` from place `first` on, in a random order that is another one in each pass.

    Args:
        first: counted over all passes.
        rng_of: the generator of pass 0, 1, ...: streams with the same ones share the values out between them.
        repeat: begin another pass at the end.
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
    """Ratings that are products of factors, plus noise.

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


def samples(observed: ObservedRatings, stream: int, streams: int, rng: np.random.Generator) -> Iterator[bytes]:
    """Packed records without end: each is drawn from the stream's share of the ratings, with replacement.

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
