"""Records to tensors: what can be used goes into the batch, what cannot is refused with a reason. Nothing raises.

A task's `decode_block` and `decode_many` are tried first. A part that these cannot decode is halved until it is small,
so one bad sample among thousands costs a few more calls and leaves the others in bulk. What bulk decoding leaves is
looked at one by one, and only there a sample is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from doll.errors import BadRecordsError, SampleError
from doll.records.control import DeadLetterCode
from doll.records.packing import Packed, unpack
from doll.records.refusals import UnreadValue
from doll.task.base import Sample, Task, as_features, as_target

NUMERIC_KINDS: Final = "biufc"  # numpy's kinds: boolean, integer, unsigned, floating, complex
_SMALL: Final = 8  # samples; a part of so many is decoded one by one once its bulk decoding failed
_FAILURES: Final = 8  # failed calls above twice the successful ones from which on the task is not asked any more

Pair: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]
MAX_REASON_CHARS = 500
_Row = tuple[int, npt.NDArray[Any], npt.NDArray[Any]]  # place in the batch, x, y


class Part(NamedTuple):
    """SampleBytes that were decoded in one call and passed every check: x of shape (k, ...), y of shape (k, ...).

    `places`, int64, shape (k,), rising: which samples of the batch they are.
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


def decode_in_bulk(task: Task, samples: SampleBytes) -> tuple[list[Part], npt.NDArray[np.int64]]:
    """What `task.decode_block` and `task.decode_many` make of a batch, and the places of all other samples, rising."""
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
    task: Task, samples: SampleBytes, places: npt.NDArray[np.int64], parts: list[Part]
) -> npt.NDArray[np.int64]:
    """Decode the samples of the most frequent width; returns the places of the remaining samples."""
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
    task: Task, samples: SampleBytes, places: npt.NDArray[np.int64], parts: list[Part]
) -> npt.NDArray[np.int64]:
    """Decode the samples at `places`; returns the places of the remaining samples."""
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
    """Append what `decode` makes of parts of `places` to `parts`; the remaining places, in any order."""
    left = [places[:0]]
    waiting = [places]
    failures = successes = 0
    while waiting:
        here = waiting.pop()
        if failures > _FAILURES + 2 * successes:
            left.append(here)  # none of the records suits, or so many are bad that halving costs more than it saves
            continue
        try:
            part = _checked_part(task, decode(here), here)
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


def _checked_part(task: Task, pair: Pair | None, here: npt.NDArray[np.int64]) -> Part | None:
    """The good samples of those at `here`; None where `pair` has no arrays of the task for all of them.

    The checks are the checks that a single sample must pass in `_check`.
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


class Records(NamedTuple):
    """The records of one batch, not decoded: value i is the record at offset i. In offset order, of one length."""

    offsets: Sequence[int]
    values: Sequence[bytes | None]
    partition: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, bytes | None]]) -> Records:
        """From (offset, value) pairs in offset order."""
        pairs = list(pairs)
        return cls([offset for offset, _ in pairs], [value for _, value in pairs])


@dataclass(frozen=True, slots=True)
class Refused:
    """SampleBytes of one record that cannot be used. `whole`: none of the record's samples can."""

    offset: int
    reason: str
    samples: int
    whole: bool
    code: DeadLetterCode = "undecodable"


@dataclass(slots=True)
class Decoded:
    """The usable samples of a batch, in stream order: x of shape (n, ...), y of shape (n, ...).

    `offsets`, int64, shape (n,): the record that each sample came in.
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    refused: list[Refused] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return len(self.x)


def decode_records(task: Task, records: Records, *, samples_per_record: int, max_record_bytes: int) -> Decoded:
    """Decode the records of one batch.

    Args:
        samples_per_record: m; above 1, each value is a packed record (`doll.records.packing`) of at most m samples.
        max_record_bytes: a longer record is refused unread.
    """
    refused: list[Refused] = []
    values, widths, offsets = _readable(records, max_record_bytes, refused)
    if samples_per_record == 1:
        samples = SampleBytes.unpacked(values, widths)
    else:
        packs, kept = [], []
        for at, value in enumerate(values):
            try:
                packs.append(unpack(value, samples_per_record))
            except SampleError as exc:
                refused.append(Refused(int(offsets[at]), str(exc), 1, True, "not_packed"))
            else:
                kept.append(at)
        samples = SampleBytes.packed(packs)
        offsets = np.repeat(offsets[kept], [pack.num_samples for pack in packs])
    with np.errstate(all="ignore"):  # a task's log of a negative number is a NaN, which is refused
        parts, left = decode_in_bulk(task, samples)
        reasons: dict[int, str] = {}
        rows = _one_by_one(task, samples, left.tolist(), reasons)
    x, y, places = _combined(parts, rows, reasons)
    if reasons:
        refused += _by_record(offsets, reasons)
    refused.sort(key=lambda item: item.offset)
    return Decoded(x, y, offsets[places], refused)


def _readable(
    records: Records, max_record_bytes: int, refused: list[Refused]
) -> tuple[list[bytes], list[int], npt.NDArray[np.int64]]:
    """The values that are neither empty nor too long, their lengths, and their offsets; the others are refused."""
    values = list(records.values)
    widths = [len(value) if value else 0 for value in values]
    offsets = _int64(records.offsets)
    if len(offsets) != len(values):
        raise ValueError(f"expected as many offsets as values, got {len(offsets)} and {len(values)}")
    if not widths or (min(widths) > 0 and max(widths) <= max_record_bytes):
        return cast(list[bytes], values), widths, offsets
    kept = []
    for at, width in enumerate(widths):
        if width == 0 and isinstance(value := values[at], UnreadValue):
            refused.append(Refused(int(offsets[at]), value.reason, 1, True, value.code))
        elif width == 0:
            refused.append(Refused(int(offsets[at]), "empty value: expected a sample", 1, True, "empty"))
        elif width > max_record_bytes:
            reason = f"record of {width} bytes: expected at most {max_record_bytes} (data.max_record_bytes)"
            refused.append(Refused(int(offsets[at]), reason, 1, True, "too_long"))
        else:
            kept.append(at)
    return [cast(bytes, values[at]) for at in kept], [widths[at] for at in kept], offsets[kept]


def _int64(offsets: Sequence[int]) -> npt.NDArray[np.int64]:
    if isinstance(offsets, range):
        return np.arange(offsets.start, offsets.stop, offsets.step, dtype=np.int64)
    return np.array(offsets, np.int64)


def refuse(decoded: Decoded, bad: Mapping[int, str]) -> list[Refused]:
    """The records of the samples at these places of the batch, which are refused after decoding.

    A record without any usable sample is refused as a whole, with the samples that decoding had refused already.
    """
    reasons: dict[int, list[str]] = {}
    for at, reason in sorted(bad.items()):
        reasons.setdefault(int(decoded.offsets[at]), []).append(reason)
    before = {item.offset: item.samples for item in decoded.refused}
    refused = []
    for offset, texts in sorted(reasons.items()):
        whole = len(texts) == int((decoded.offsets == offset).sum())
        samples = len(texts) + (before.get(offset, 0) if whole else 0)
        refused.append(Refused(offset, texts[0][:MAX_REASON_CHARS], samples, whole, "harmful"))
    return refused


def _one_by_one(task: Task, samples: SampleBytes, places: Sequence[int], reasons: dict[int, str]) -> list[_Row]:
    """The samples at these places that can be used; `reasons` gets the reasons for the others, by place."""
    rows: list[_Row] = []
    for place in places:
        try:
            rows.append((place, *_check(task, task.decode(samples[place]))))
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # whatever the user's decode raises: also sys.exit, and a panic of a Rust library
            text = str(exc) if isinstance(exc, SampleError) else f"{type(exc).__name__}: {exc}"
            reasons[place] = text[:MAX_REASON_CHARS]
    return rows


def _combined(
    parts: Sequence[Part], rows: list[_Row], reasons: dict[int, str]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]]:
    """x, y and places of all usable samples, in order; `reasons` gets why samples do not suit the others."""
    if len(parts) == 1 and not rows:
        return parts[0].x, parts[0].y, parts[0].places
    forms = {(part.x.dtype, part.x.shape[1:], part.y.dtype, part.y.shape[1:]) for part in parts}
    forms |= {(x.dtype, x.shape, y.dtype, y.shape) for _, x, y in rows}
    if len(forms) > 1:  # what most of the batch have decides, as if all of it had been decoded one by one
        rows = rows + [row for part in parts for row in zip(part.places.tolist(), part.x, part.y, strict=True)]
        rows = _same_kind(_same_shape(sorted(rows, key=lambda row: row[0]), reasons), reasons)
        parts = []
    if rows:
        places = np.array([place for place, _, _ in rows], np.int64)
        x = as_features(np.stack([x for _, x, _ in rows]))
        parts = [*parts, Part(places, x, np.stack([y for _, _, y in rows]))]
    if not parts:
        return np.zeros((0,), np.float32), np.zeros((0,), np.float32), np.zeros((0,), np.int64)
    places = np.concatenate([part.places for part in parts])
    order = np.argsort(places)
    x, y = (np.concatenate(arrays) for arrays in ([p.x for p in parts], [p.y for p in parts]))
    return x[order], y[order], places[order]


def _by_record(offsets: npt.NDArray[np.int64], reasons: Mapping[int, str]) -> list[Refused]:
    """The refused samples of each record, with the reason that was found first."""
    texts: dict[int, list[str]] = {}
    for place, text in reasons.items():
        texts.setdefault(int(offsets[place]), []).append(text)
    totals = Counter(offsets.tolist())
    return [Refused(offset, own[0], len(own), len(own) == totals[offset]) for offset, own in texts.items()]


def _check(task: Task, sample: Sample | tuple[Any, Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    x, y = as_features(sample[0]), as_target(sample[1])
    for name, array in (("x", x), ("y", y)):
        if array.dtype.kind not in NUMERIC_KINDS:
            what = "mixed or ragged values" if array.dtype == object else f"values of type {array.dtype}"
            raise SampleError(f"expected numbers in {name}, got {what}")
    if task.input_shape is not None and x.shape != task.input_shape:
        raise SampleError(f"expected x of shape {task.input_shape}, got {x.shape}")
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
        raise SampleError("x holds NaN or infinity")
    if np.issubdtype(y.dtype, np.floating) and not np.isfinite(y).all():
        raise SampleError("y is NaN or infinite")
    if task.num_classes is not None and not (y.ndim == 0 and float(y).is_integer() and 0 <= y < task.num_classes):
        raise SampleError(f"expected a class 0 to {task.num_classes - 1}, got {y.tolist()!r}"[:MAX_REASON_CHARS])
    return x, y


def _same_kind(rows: list[_Row], reasons: dict[int, str]) -> list[_Row]:
    """SampleBytes with integers among samples with floats: integers become floats, where that does not change them."""
    xs = _one_kind([x for _, x, _ in rows], 1 << 24)  # up to there float32 holds every integer
    ys = _one_kind([y for _, _, y in rows], 1 << 53)
    kept = []
    for (place, *values), x, y in zip(rows, xs, ys, strict=True):
        if x is not None and y is not None:
            kept.append((place, x, y))
        else:
            name, value = ("x", values[0]) if x is None else ("y", values[1])
            text = f"expected integers in {name} as most of the batch, got {value.ravel()[:4].tolist()}"
            reasons[place] = text[:MAX_REASON_CHARS]
    return kept


def _one_kind(arrays: list[npt.NDArray[Any]], exact: int) -> list[npt.NDArray[Any] | None]:
    """Where most hold integers and some too large for floats (ids), floats must be whole numbers; None: it is not."""
    integers = [array.dtype.kind in "biu" for array in arrays]
    count = sum(integers)
    if count == len(arrays) or 2 * count <= len(arrays) or all(
        _within(array, exact) for array, integer in zip(arrays, integers, strict=True) if integer
    ):  # fmt: skip
        return list(arrays)
    return [
        array if integer
        else array.astype(np.int64) if _within(array, exact) and bool((np.floor(array) == array).all())
        else None
        for array, integer in zip(arrays, integers, strict=True)
    ]  # fmt: skip


def _within(array: npt.NDArray[Any], bound: int) -> bool:
    return array.size == 0 or bool(array.max() <= bound and array.min() >= -bound)


def _same_shape(rows: list[_Row], reasons: dict[int, str]) -> list[_Row]:
    """Without a declared shape, the shape that most samples of the batch have is the right one."""
    shapes = Counter((x.shape, y.shape) for _, x, y in rows)
    if len(shapes) <= 1:
        return rows
    (usual, _) = shapes.most_common(1)[0]
    kept = []
    for place, x, y in rows:
        if (x.shape, y.shape) == usual:
            kept.append((place, x, y))
        else:
            text = f"expected x {usual[0]} and y {usual[1]} as most of the batch, got x {x.shape} and y {y.shape}"
            reasons[place] = text
    return kept
