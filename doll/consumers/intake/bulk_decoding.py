"""Decoding many samples in one call of the task. Pure but for the task's code; nothing raises.

A part that the task cannot decode is halved until it is small, so one bad sample among thousands costs a few more calls
and leaves the others in bulk. What bulk decoding does not settle is left to `doll.consumers.intake.decoding`, sample by
sample: only there a sample is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BadRecordsError
from doll.records.packing import Packed
from doll.task.base import Task, as_features, as_target

NUMERIC_KINDS: Final = "biufc"  # numpy's kinds: boolean, integer, unsigned, floating, complex
_SMALL: Final = 8  # samples; a part of so many is decoded one by one once its bulk decoding failed
_FAILURES: Final = 8  # failed calls above twice the successful ones from which on the task is not asked any more

Pair: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class Part(NamedTuple):
    """Samples that were decoded in one call and passed every check: x of shape (k, ...), y of shape (k, ...).

    `places`, int64, shape (k,), rising: which samples of the batch they are.
    """

    places: npt.NDArray[np.int64]
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]


class Samples:
    """The bytes of a batch's samples, as a list or, where all have one width, as one block.

    Attributes:
        width: bytes of each sample; 0: they differ.
    """

    def __init__(self, values: list[bytes] | None, bodies: Sequence[memoryview | bytes], width: int) -> None:
        self._values = values
        self._bodies = bodies
        self._block: memoryview | None = None
        self.width = width
        self._count = len(values) if values is not None else sum(map(len, bodies)) // width

    @classmethod
    def unpacked(cls, values: list[bytes], widths: list[int]) -> Samples:
        """Of records that hold one sample each.

        Args:
            widths: the lengths of `values`.
        """
        width = widths[0] if widths and widths.count(widths[0]) == len(widths) else 0
        return cls(values, values, width)

    @classmethod
    def packed(cls, packs: Sequence[Packed]) -> Samples:
        """Of packed records."""
        widths = {pack.width for pack in packs}
        if len(widths) == 1 and 0 not in widths:
            return cls(None, [pack.body for pack in packs], widths.pop())
        values = list(chain.from_iterable(pack.samples() for pack in packs))
        return cls.unpacked(values, list(map(len, values)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> bytes:
        if self._values is not None:
            return self._values[place]
        return bytes(self.block[place * self.width : (place + 1) * self.width])

    @property
    def block(self) -> memoryview:
        """All samples, end to end; only where they have one width. Joined at most once."""
        if self._block is None:
            self._block = memoryview(self._bodies[0] if len(self._bodies) == 1 else b"".join(self._bodies))
        return self._block

    def values(self) -> list[bytes]:
        """Each sample's bytes."""
        if self._values is None:
            data, width = bytes(self.block), self.width
            self._values = [data[at : at + width] for at in range(0, len(data), width)]
        return self._values


def decode_in_bulk(task: Task, samples: Samples) -> tuple[list[Part], npt.NDArray[np.int64]]:
    """What `task.decode_block` and `task.decode_many` make of a batch.

    Returns:
        The parts that were decoded and the places of all other samples, rising.
    """
    parts: list[Part] = []
    left = np.arange(len(samples))
    if _overrides(task, "decode_block"):
        left = _decode_blocks(task, samples, left, parts)
    if len(left) and _overrides(task, "decode_many"):
        left = _decode_many(task, samples, left, parts)
    return parts, left


def _overrides(task: Task, name: str) -> bool:
    return getattr(type(task), name) is not getattr(Task, name) or name in vars(task)


def _decode_blocks(
    task: Task, samples: Samples, places: npt.NDArray[np.int64], parts: list[Part]
) -> npt.NDArray[np.int64]:
    """Decode the samples of the most frequent width; the places of those that remain."""
    if not len(samples):
        return places
    if samples.width:
        block, width, others = samples.block, samples.width, places[:0]
    else:
        values = samples.values()
        widths = list(map(len, values))
        ((width, count),) = Counter(widths).most_common(1)
        if count <= _SMALL:
            return places
        same = np.array(widths) == width
        places, others = places[same], places[~same]
        block = memoryview(b"".join([value for value in values if len(value) == width]))

    def decode(here: npt.NDArray[np.int64]) -> Pair | None:
        lo = int(np.searchsorted(places, here[0])) * width
        return task.decode_block(block[lo : lo + len(here) * width], width)

    return np.sort(np.concatenate([others, _halving(task, places, decode, parts)]))


def _decode_many(
    task: Task, samples: Samples, places: npt.NDArray[np.int64], parts: list[Part]
) -> npt.NDArray[np.int64]:
    """Decode the samples at `places`; the places of those that remain."""
    values = samples.values()

    def decode(here: npt.NDArray[np.int64]) -> Pair | None:
        # A list of its own: a task that consumes it and then fails leaves the values for the next try.
        return task.decode_many(
            list(values) if len(here) == len(values) else [values[place] for place in here.tolist()]
        )

    return np.sort(_halving(task, places, decode, parts))


def _halving(
    task: Task,
    places: npt.NDArray[np.int64],
    decode: Callable[[npt.NDArray[np.int64]], Pair | None],
    parts: list[Part],
) -> npt.NDArray[np.int64]:
    """Append what `decode` makes of parts of `places` to `parts`; the places of those that remain, in any order."""
    left = [places[:0]]
    waiting = [places]
    failures = successes = 0
    while waiting:
        here = waiting.pop()
        if failures > _FAILURES + 2 * successes:
            left.append(here)  # none of the records suits, or so many are bad that halving costs more than it saves
            continue
        try:
            part = _checked(task, decode(here), here)
        except BadRecordsError as exc:
            bad = np.isin(np.arange(len(here)), exc.positions)
            if bad.any():
                failures += 1
                left.append(here[bad])
                waiting += [here[~bad]] if not bad.all() else []
                continue
            part = None
        except KeyboardInterrupt:
            raise
        except BaseException:  # the user's code may raise or return anything; decoding one by one gives the reasons
            part = None
        if part is not None:
            successes += 1
            parts += [part] if len(part.places) else []
            left.append(
                np.setdiff1d(here, part.places, assume_unique=True) if len(part.places) < len(here) else here[:0]
            )
        else:
            failures += 1
            if len(here) <= _SMALL:
                left.append(here)
            else:
                waiting += [here[len(here) // 2 :], here[: len(here) // 2]]
    return np.concatenate(left)


def _checked(task: Task, pair: Pair | None, here: npt.NDArray[np.int64]) -> Part | None:
    """The good samples of those at `here`; None where `pair` has no arrays of the task for all of them.

    The checks are those that a single sample must pass in `doll.consumers.intake.decoding`.
    """
    if pair is None:
        return None
    x, y = pair
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
        return None  # the type of a list's array would depend on the records that are decoded with it
    x, y = as_features(x), as_target(y)
    if x.dtype.kind not in NUMERIC_KINDS or y.dtype.kind not in NUMERIC_KINDS or not len(x) == len(y) == len(here):
        return None
    if task.input_shape is not None and x.shape[1:] != task.input_shape:
        return None
    if task.num_classes is not None and y.ndim != 1:
        return None
    tests = [np.isfinite(array) for array in (x, y) if array.dtype.kind == "f"]
    if task.num_classes is not None:
        tests += [y >= 0, y < task.num_classes]
        if y.dtype.kind == "f":
            tests.append(np.floor(y) == y)
    if all(test.all() for test in tests):
        return Part(here, x, y)
    good = np.ones(len(here), np.bool_)
    for test in tests:
        good &= test.reshape(len(here), -1).all(axis=1)
    return Part(here[good], x[good], y[good])
