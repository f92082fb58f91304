"""Decoding in bulk: what a task's `decode_block` and `decode_many` make of a batch. Nothing is refused here.

A part that these cannot decode is halved until it is small, so one bad sample among thousands costs a few more calls
and leaves the others in bulk. What is left is decoded one by one (`decoding`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BadRecordsError, ConfigError, RetryLater, TaskError
from doll.records.packing import Packed
from doll.task.base import Samples, Task, as_features, as_target
from doll.task.records import Envelope, Records

NUMERIC_KINDS: Final = "biufc"  # numpy's kinds: boolean, integer, unsigned, floating, complex
# What the user's code raises about more than a record: the batch is decoded again, or this process ends.
NOT_OF_RECORDS: Final = (KeyboardInterrupt, RetryLater, TaskError, ConfigError)
_SMALL: Final = 8  # samples; a part of so many is decoded one by one once its bulk decoding failed
_FAILURES: Final = 8  # failed calls above twice the successful ones from which on the task is not asked any more

Pair: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class Part(NamedTuple):
    """Samples that were decoded in one call and passed every check: x of shape (k, ...), y of shape (k, ...).

    `places`, int64, shape (k,), rising: which values of the batch they come from; a value may give several.
    """

    places: npt.NDArray[np.int64]
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]


class SampleBytes:
    """The bytes of a batch's samples, as a list or, where all have one width, as one block."""

    def __init__(self, values: list[bytes] | None, bodies: Sequence[memoryview | bytes], width: int) -> None:
        self._values = values
        self._bodies = bodies
        self._block: memoryview | None = None
        self.width = width  # bytes of each sample; 0: they differ
        self._count = len(values) if values is not None else sum(map(len, bodies)) // width

    @classmethod
    def unpacked(cls, values: list[bytes], widths: list[int]) -> SampleBytes:
        """Of records that hold one sample each."""
        width = widths[0] if widths and widths.count(widths[0]) == len(widths) else 0
        return cls(values, values, width)

    @classmethod
    def packed(cls, packs: Sequence[Packed]) -> SampleBytes:
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


@dataclass(slots=True)
class Origins:
    """Where a batch's samples come from.

    Attributes:
        offsets: int64, one for each sample: of its record.
        partition: of all of them.
        envelopes: one for each sample: of its record; None where the task does not read them.
    """

    offsets: npt.NDArray[np.int64]
    partition: int = 0
    envelopes: Sequence[Envelope | None] | None = None

    def envelope(self, place: int) -> Envelope | None:
        """Of the record of one sample."""
        return None if self.envelopes is None else self.envelopes[place]


@dataclass(slots=True)
class Bulk:
    """What bulk decoding made of a batch.

    Attributes:
        parts: what was decoded.
        skipped: places of the samples that the task skips, with the reasons.
        left: places of all other samples, rising.
    """

    left: npt.NDArray[np.int64]
    parts: list[Part] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)


def decode_in_bulk(task: Task, samples: SampleBytes, origins: Origins) -> Bulk:
    """What `task.decode_block` and `task.decode_many` make of a batch.

    Raises:
        RetryLater, TaskError, ConfigError: as the task raises them.
    """
    bulk = Bulk(np.arange(len(samples)))
    if _overrides(task, "decode_block"):
        _decode_blocks(task, samples, bulk)
    if len(bulk.left) and _overrides(task, "decode_many"):
        _decode_many(task, samples, origins, bulk)
    return bulk


def _overrides(task: Task, name: str) -> bool:
    return getattr(type(task), name) is not getattr(Task, name) or name in vars(task)


def _decode_blocks(task: Task, samples: SampleBytes, bulk: Bulk) -> None:
    """Decode the samples of the most frequent width."""
    places = bulk.left
    if not len(samples):
        return
    if samples.width:
        block, width, others = samples.block, samples.width, places[:0]
    else:
        values = samples.values()
        widths = list(map(len, values))
        ((width, count),) = Counter(widths).most_common(1)
        if count <= _SMALL:
            return
        same = np.array(widths) == width
        places, others = places[same], places[~same]
        block = memoryview(b"".join([value for value in values if len(value) == width]))

    def decode(here: npt.NDArray[np.int64]) -> Pair | None:
        lo = int(np.searchsorted(places, here[0])) * width
        return task.decode_block(block[lo : lo + len(here) * width], width)

    bulk.left = np.sort(np.concatenate([others, _halving(task, places, decode, bulk)]))


def _decode_many(task: Task, samples: SampleBytes, origins: Origins, bulk: Bulk) -> None:
    """Decode the samples that are left."""
    values, envelopes = samples.values(), origins.envelopes

    def decode(here: npt.NDArray[np.int64]) -> Samples | Pair | None:
        # A list of its own: a task that consumes it and then fails leaves the values for the next try.
        if len(here) == len(values):
            return task.decode_many(Records(values, origins.offsets, origins.partition, envelopes))
        places = here.tolist()
        own = None if envelopes is None else [envelopes[place] for place in places]
        records = Records([values[place] for place in places], origins.offsets[here], origins.partition, own)
        return task.decode_many(records)

    bulk.left = np.sort(_halving(task, bulk.left, decode, bulk))


def _halving(
    task: Task,
    places: npt.NDArray[np.int64],
    decode: Callable[[npt.NDArray[np.int64]], Samples | Pair | None],
    bulk: Bulk,
) -> npt.NDArray[np.int64]:
    """Add what `decode` makes of parts of `places` to `bulk`; the remaining places, in any order."""
    left = [places[:0]]
    waiting = [places]
    failures = successes = 0
    while waiting:
        here = waiting.pop()
        if failures > _FAILURES + 2 * successes:
            left.append(here)  # none of the records suits, or so many are bad that halving costs more than it saves
            continue
        try:
            part = _checked_part(task, decode(here), here, bulk.skipped)
        except BadRecordsError as exc:
            bad = np.isin(np.arange(len(here)), exc.positions)
            if bad.any():
                failures += 1
                left.append(here[bad])
                waiting += [here[~bad]] if not bad.all() else []
                continue
            part = None
        except NOT_OF_RECORDS:
            raise
        except BaseException:  # the user's code may raise or return anything; decoding one by one gives the reasons
            part = None
        if part is not None:
            successes += 1
            bulk.parts += [part] if len(part.places) else []
            covered = part.places if task.max_samples_per_record == 1 else np.unique(part.places)
            if len(covered) < len(here):
                others = np.setdiff1d(here, covered, assume_unique=True)
                left.append(np.array([at for at in others.tolist() if at not in bulk.skipped], np.int64))
        else:
            failures += 1
            if len(here) <= _SMALL:
                left.append(here)
            else:
                waiting += [here[len(here) // 2 :], here[: len(here) // 2]]
    return np.concatenate(left)


def _checked_part(
    task: Task, made: Samples | Pair | None, here: npt.NDArray[np.int64], skipped: dict[int, str]
) -> Part | None:
    """The good samples of those at `here`; None where `made` has no arrays of the task for all that it does not skip.

    The checks are the checks that a single sample must pass in `decoding`.
    """
    if made is None:
        return None
    x, y = made[:2] if isinstance(made, Samples) else made
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
        return None  # the type of a list's array would depend on the records that are decoded with it
    if isinstance(made, Samples) and made.skipped:
        if (reasons := _skips(made.skipped, len(here))) is None:
            return None
        if len(reasons) == len(here) and not (len(x) or len(y)):
            skipped.update((int(here[at]), reason) for at, reason in reasons.items())
            return Part(here[:0], x, y)
    else:
        reasons = {}
    x, y = as_features(x), as_target(y)
    counts = made.counts if isinstance(made, Samples) else None
    if counts is not None and not _are_counts(counts, len(here), task.max_samples_per_record, reasons):
        return None
    count = len(here) - len(reasons) if counts is None else int(counts.sum())
    if x.dtype.kind not in NUMERIC_KINDS or y.dtype.kind not in NUMERIC_KINDS or not len(x) == len(y) == count:
        return None
    if task.input_shape is not None and x.shape[1:] != task.input_shape:
        return None
    if task.num_classes is not None and y.ndim != 1:
        return None
    if reasons:
        skipped.update((int(here[at]), reason) for at, reason in reasons.items())
    if counts is not None:
        here = np.repeat(here, counts)
    elif reasons:
        here = np.delete(here, list(reasons))
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
    if counts is not None:
        good = ~np.isin(here, here[~good])  # a value gives all its samples or none
    return Part(here[good], x[good], y[good])


def _are_counts(counts: Any, length: int, most: int, reasons: Mapping[int, str]) -> bool:
    """Whether these say how many samples each of `length` values gives: none exactly where it is skipped."""
    return (
        isinstance(counts, np.ndarray)
        and counts.dtype.kind in "iu"
        and counts.shape == (length,)
        and 0 <= int(counts.min(initial=0)) <= int(counts.max(initial=0)) <= most
        and np.flatnonzero(counts == 0).tolist() == sorted(reasons)
    )


def _skips(skipped: Mapping[str, npt.NDArray[np.bool_]], count: int) -> dict[int, str] | None:
    """Which of `count` samples are skipped, and why; None where these are no masks of as many."""
    reasons: dict[int, str] = {}
    for reason, mask in skipped.items():
        if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (count,)):
            return None
        for at in np.flatnonzero(mask).tolist():
            reasons.setdefault(at, str(reason))
    return reasons
