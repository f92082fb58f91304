"""Bulk decoding of a batch with a task's `decode_block` and `decode_many`. This module refuses no sample.

A part of the batch that cannot be decoded is halved until it is small. So one bad sample among thousands costs a few
more calls, and the other samples are still decoded in bulk. The small parts are decoded one by one (`decoding`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BadRecordsError, ConfigError, RetryLater, SampleError, TaskError
from doll.records.packing import PackedRecord
from doll.task import trees
from doll.task.base import Sample, Samples, Task
from doll.task.batches import ANY_FORMS, Forms, SampleBatch, SampleRow, batch_of_rows, features_of, row_of
from doll.task.forms import NUMERIC_KINDS, Form, as_target, group_of
from doll.task.records import Envelope, Records
from doll.task.trees import Array, Structure, Tree

_MAX_SHOWN: Final = 500


def checked(task: Task, sample: Sample | tuple[Any, Any], forms: Forms) -> SampleRow:
    """Return the arrays of a sample. Raise SampleError if the sample cannot be learned."""
    row = row_of(sample, forms)
    for root, structure, arrays in (("x", row.x_structure, row.x), ("y", row.y_structure, row.y)):
        for at, array in enumerate(arrays):
            if array.dtype.kind not in NUMERIC_KINDS:
                what = "mixed or ragged values" if array.dtype == object else f"values of type {array.dtype}"
                raise SampleError(f"expected numbers in {trees.names(root, structure)[at]}, got {what}")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                name, problem = trees.names(root, structure)[at], "holds NaN or infinity"
                raise SampleError(f"{name} {problem if root == 'x' else 'is NaN or infinite'}")
    if task.input_shape is not None and (row.x_structure is not None or row.x[0].shape != task.input_shape):
        got = row.x[0].shape if row.x_structure is None else f"{len(row.x)} arrays"
        raise SampleError(f"expected x of shape {task.input_shape}, got {got}")
    if (classes := task.num_classes) is not None and row.y_structure is None:
        y = row.y[0]
        if y.ndim == 0:
            is_good = float(y).is_integer() and bool(0 <= y < classes)
        else:
            is_good = (forms.y is not None or forms.is_ragged) and bool(are_classes(y, classes).all())
        if not is_good:
            raise SampleError(f"expected a class 0 to {classes - 1}, got {y.tolist()!r}"[:_MAX_SHOWN])
    return row


def are_classes(y: npt.NDArray[Any], num_classes: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the numbers that are classes 0 to `num_classes` - 1."""
    are: npt.NDArray[np.bool_] = (y >= 0) & (y < num_classes)
    return are & (np.floor(y) == y) if y.dtype.kind == "f" else are


# Exceptions of the user's code that concern more than a record: the batch is decoded again, or this process ends.
NOT_OF_RECORDS: Final = (KeyboardInterrupt, RetryLater, TaskError, ConfigError)
_SMALL: Final = 8  # samples; a part of so many is decoded one by one if its bulk decoding fails
_FAILURES: Final = 8  # bulk decoding stops if more calls fail than this plus twice the successful calls

_NO_ROW: Final = SampleRow([np.zeros(0)], None, [np.zeros(0)], None)

Pair: TypeAlias = tuple[Tree, Tree]


class Part(NamedTuple):
    """k samples that were decoded in one call and passed every check.

    `places`, int64, shape (k,), ascending: the positions of their values in the batch. The task may make several
    samples of one value.
    """

    places: npt.NDArray[np.int64]
    samples: SampleBatch


class SampleBytes:
    """The bytes of a batch's samples: a list or, if all samples have the same width, one block."""

    def __init__(self, values: list[bytes] | None, bodies: Sequence[memoryview | bytes], width: int) -> None:
        self._values = values
        self._bodies = bodies
        self._block: memoryview | None = None
        self.width = width  # bytes of each sample; 0: different widths
        self._count = len(values) if values is not None else sum(map(len, bodies)) // width

    @classmethod
    def unpacked(cls, values: list[bytes], widths: list[int]) -> SampleBytes:
        width = widths[0] if widths and widths.count(widths[0]) == len(widths) else 0
        return cls(values, values, width)

    @classmethod
    def packed(cls, packs: Sequence[PackedRecord]) -> SampleBytes:
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
        """All samples, concatenated at most once. Only allowed if all samples have the same width."""
        if self._block is None:
            self._block = memoryview(self._bodies[0] if len(self._bodies) == 1 else b"".join(self._bodies))
        return self._block

    def values(self) -> list[bytes]:
        if self._values is None:
            data, width = bytes(self.block), self.width
            self._values = [data[at : at + width] for at in range(0, len(data), width)]
        return self._values


@dataclass(slots=True)
class Origins:
    """The offset of each sample's record, int64; the partition; and the envelope of each sample's record (None: the
    task does not read envelopes)."""

    offsets: npt.NDArray[np.int64]
    partition: int = 0
    envelopes: Sequence[Envelope | None] | None = None

    def envelope(self, place: int) -> Envelope | None:
        return None if self.envelopes is None else self.envelopes[place]


@dataclass(slots=True)
class Bulk:
    """The result of decoding a batch in bulk: the decoded parts, the position and reason of each sample that the task
    skips, and the ascending positions `left` of all other samples."""

    left: npt.NDArray[np.int64]
    parts: list[Part] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)


def decode_in_bulk(task: Task, samples: SampleBytes, origins: Origins, forms: Forms = ANY_FORMS) -> Bulk:
    """Decode a batch with the task's `decode_block` and `decode_many`. `forms` is the form that x and y must have;
    samples of another form are not decoded. RetryLater, TaskError and ConfigError of the task are raised."""
    bulk = Bulk(np.arange(len(samples)))
    if task.defines("decode_block"):
        _decode_blocks(task, samples, bulk, forms)
    if len(bulk.left) and task.defines("decode_many"):
        _decode_many(task, samples, origins, bulk, forms)
    return bulk


def _decode_blocks(task: Task, samples: SampleBytes, bulk: Bulk, forms: Forms) -> None:
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

    bulk.left = np.sort(np.concatenate([others, _halving(task, places, decode, bulk, forms)]))


def _decode_many(task: Task, samples: SampleBytes, origins: Origins, bulk: Bulk, forms: Forms) -> None:
    values, envelopes = samples.values(), origins.envelopes

    def decode(here: npt.NDArray[np.int64]) -> Samples | Pair | None:
        # A separate list: if a task consumes it and then fails, the values are still there for the next try.
        if len(here) == len(values):
            return task.decode_many(Records(values, origins.offsets, origins.partition, envelopes))
        places = here.tolist()
        own = None if envelopes is None else [envelopes[place] for place in places]
        records = Records([values[place] for place in places], origins.offsets[here], origins.partition, own)
        return task.decode_many(records)

    bulk.left = np.sort(_halving(task, bulk.left, decode, bulk, forms))


def _halving(
    task: Task,
    places: npt.NDArray[np.int64],
    decode: Callable[[npt.NDArray[np.int64]], Samples | Pair | None],
    bulk: Bulk,
    forms: Forms,
) -> npt.NDArray[np.int64]:
    """Add the decoded parts of `places` to `bulk`, and return the remaining positions, in any order."""
    left = [places[:0]]
    waiting = [places]
    failures = successes = 0
    while waiting:
        here = waiting.pop()
        if failures > _FAILURES + 2 * successes:
            left.append(here)  # no record is good, or so many are bad that halving costs more than it saves
            continue
        try:
            part = _checked_part(task, decode(here), here, bulk.skipped, forms)
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
    task: Task, made: Samples | Pair | None, here: npt.NDArray[np.int64], skipped: dict[int, str], forms: Forms
) -> Part | None:
    """Return the good samples among the values at `here`. Return None if `made` lacks valid arrays for a value that it
    does not skip.

    The checks are the same as for a single sample in `decoding`.
    """
    if made is None:
        return None
    (xs, x_structure), (ys, y_structure) = trees.flat(made[0]), trees.flat(made[1])
    if not (xs and ys and all(isinstance(array, np.ndarray) for array in (*xs, *ys))):
        return None  # the array type of a list would depend on the records decoded together with it
    if isinstance(made, Samples) and made.skipped:
        if (reasons := _skips(made.skipped, len(here))) is None:
            return None
        if len(reasons) == len(here) and not any(len(array) for array in (*xs, *ys)):
            skipped.update((int(here[at]), reason) for at, reason in reasons.items())
            return Part(here[:0], SampleBatch(made[0], made[1]))
    else:
        reasons = {}
    counts = made.counts if isinstance(made, Samples) else None
    if counts is not None and not _are_counts(counts, len(here), task.max_samples_per_record, reasons):
        return None
    count = len(here) - len(reasons) if counts is None else int(counts.sum())
    if any(array.ndim == 0 or len(array) != count for array in (*xs, *ys)):
        return None
    good: npt.NDArray[np.bool_] | None
    if forms.is_ragged:
        samples, good = _ragged(task, made, count, forms)
    else:
        weight, group = _extras(made, count) if isinstance(made, Samples) else (None, None)
        xs, ys = features_of(xs, x_structure, forms.x), ys if forms.y is not None else list(map(as_target, ys))
        if any(array.dtype.kind not in NUMERIC_KINDS for array in (*xs, *ys)):
            return None
        if task.input_shape is not None and (x_structure is not None or xs[0].shape[1:] != task.input_shape):
            return None
        if task.num_classes is not None and y_structure is None and forms.y is None and ys[0].ndim != 1:
            return None
        xs, ys = _fitted(xs, x_structure, forms.x), _fitted(ys, y_structure, forms.y)
        samples = SampleBatch(trees.tree_of(x_structure, xs), trees.tree_of(y_structure, ys), weight, group)
        tests = [np.isfinite(array) for array in (*xs, *ys) if array.dtype.kind == "f"]
        if task.num_classes is not None and y_structure is None:
            tests.append(are_classes(ys[0], task.num_classes))
        if weight is not None:
            tests.append((weight >= 0) & (weight < np.inf))
        good = None if all(test.all() for test in tests) else _good(tests, count)
    if reasons:
        skipped.update((int(here[at]), reason) for at, reason in reasons.items())
    if counts is not None:
        here = np.repeat(here, counts)
    elif reasons:
        here = np.delete(here, list(reasons))
    if good is None:
        return Part(here, samples)
    if counts is not None:
        good = ~np.isin(here, here[~good])  # all samples of a value are good, or none
    return Part(here[good], samples.take(np.flatnonzero(good).tolist()))


def _good(tests: Sequence[npt.NDArray[np.bool_]], count: int) -> npt.NDArray[np.bool_]:
    good = np.ones(count, np.bool_)
    for test in tests:
        good &= test.reshape(count, -1).all(axis=1)
    return good


def _fitted(arrays: list[Array], structure: Structure | None, form: Form | None) -> list[Array]:
    """Return the arrays in the declared form. Raise SampleError if they have another form."""
    if form is None:
        return arrays
    if structure != form.structure:
        raise SampleError(f"expected {form.described()}")
    return form.fitted(arrays, lead=1)


def _extras(made: Samples, count: int) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.int64] | None]:
    """Return the weights and the groups of the samples. Raise SampleError if their number or type is wrong."""
    weight, group = made.weight, made.group
    if weight is not None:
        weight = np.asarray(weight)
        if weight.shape != (count,) or weight.dtype.kind not in "biuf":
            raise SampleError(f"expected {count} weights, got {weight.dtype} of shape {weight.shape}")
        weight = None if (weight == 1).all() else weight.astype(np.float32)
    if group is not None:
        group = np.asarray(group)
        if group.shape != (count,):
            raise SampleError(f"expected {count} groups, got an array of shape {group.shape}")
        group = np.array(list(map(group_of, group.tolist())), np.int64) if group.dtype.kind not in "iu" else _ids(group)
    return weight, group


def _ids(group: Array) -> npt.NDArray[np.int64]:
    if group.size and int(group.max()) >= 1 << 63:
        raise SampleError("expected groups of 64 bits")
    return group.astype(np.int64)


def _ragged(
    task: Task, made: Samples | Pair, count: int, forms: Forms
) -> tuple[SampleBatch, npt.NDArray[np.bool_]]:  # fmt: skip
    """Return the samples of a task whose samples may differ in shape, and a mask of the good samples.

    Bad samples are empty. The values of one array of all samples are stored in an array of objects.
    """
    xs, ys = trees.taken_apart(made[0], count), trees.taken_apart(made[1], count)
    more = [[None] * count if part is None else np.asarray(part).tolist() for part in made[4:]] or [[None] * count] * 2
    rows: list[SampleRow] = []
    good = np.ones(count, np.bool_)
    for at, (x, y, weight, group) in enumerate(zip(xs, ys, *more, strict=True)):
        try:
            rows.append(checked(task, Sample(x, y, 1.0 if weight is None else weight, group), forms))
        except SampleError:
            good[at] = False
            rows.append(_NO_ROW)
    return batch_of_rows(rows, is_ragged=True), good


def _are_counts(counts: Any, length: int, most: int, reasons: Mapping[int, str]) -> bool:
    """Return whether `counts` are valid numbers of samples for `length` values: 0 exactly for skipped values."""
    return (
        isinstance(counts, np.ndarray)
        and counts.dtype.kind in "iu"
        and counts.shape == (length,)
        and 0 <= int(counts.min(initial=0)) <= int(counts.max(initial=0)) <= most
        and np.flatnonzero(counts == 0).tolist() == sorted(reasons)
    )


def _skips(skipped: Mapping[str, npt.NDArray[np.bool_]], count: int) -> dict[int, str] | None:
    """Return the position and reason of each skipped value; None if the masks are not valid for `count` values."""
    reasons: dict[int, str] = {}
    for reason, mask in skipped.items():
        if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (count,)):
            return None
        for at in np.flatnonzero(mask).tolist():
            reasons.setdefault(at, str(reason))
    return reasons
