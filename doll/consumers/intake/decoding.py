"""Records to tensors: what can be used goes into the batch, what cannot is refused with a reason. Of the task's
exceptions, only those that are not about records get through.

Bulk decoding (`bulk`) is tried first. What it leaves is looked at one by one, and only there a sample is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from doll.consumers.intake.bulk import NOT_OF_RECORDS, NUMERIC_KINDS, Origins, Part, SampleBytes, decode_in_bulk
from doll.errors import SampleError, SkipRecord
from doll.records.control import DeadLetterCode
from doll.records.packing import unpack
from doll.records.refusals import ReasonCounts, UnreadValue
from doll.task.base import Sample, Task, as_features, as_target
from doll.task.records import Envelope, record_of

MAX_REASON_CHARS = 500
TOMBSTONE = "tombstone"
NO_SAMPLE = "no sample"
_Row = tuple[int, npt.NDArray[Any], npt.NDArray[Any]]  # which value of the batch it comes from, x, y


class RawRecords(NamedTuple):
    """The records of one batch, not decoded: value i is the record at offset i. In offset order, of one length.

    `envelopes`: one for each value; empty where the task does not read them.
    """

    offsets: Sequence[int]
    values: Sequence[bytes | None]
    partition: int = 0
    envelopes: Sequence[Envelope | None] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, bytes | None]]) -> RawRecords:
        """From (offset, value) pairs in offset order."""
        pairs = list(pairs)
        return cls([offset for offset, _ in pairs], [value for _, value in pairs])


@dataclass(frozen=True, slots=True)
class Refused:
    """Samples of one record that cannot be used. `whole`: none of the record's samples can."""

    offset: int
    reason: str
    samples: int
    whole: bool
    code: DeadLetterCode = "undecodable"


@dataclass(slots=True)
class Decoded:
    """The usable samples of a batch, in stream order: x of shape (n, ...), y of shape (n, ...).

    `offsets`, int64, shape (n,): the record that each sample came in. `skipped`: why the task has left samples out, and
    how many for each reason.
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    refused: list[Refused] = field(default_factory=list)
    skipped: tuple[tuple[str, int], ...] = ()

    @property
    def num_samples(self) -> int:
        return len(self.x)


def decode_records(
    task: Task, records: RawRecords, *, samples_per_record: int, max_record_bytes: int, skip_tombstones: bool = False
) -> Decoded:
    """Decode the records of one batch.

    Args:
        samples_per_record: m; above 1, each value is a packed record (`doll.records.packing`) of at most m samples.
        max_record_bytes: a longer record is refused unread.
        skip_tombstones: a record without a value is skipped, and not refused.

    Raises:
        RetryLater, TaskError, ConfigError: as the task raises them. Nothing of the batch is decoded then.
    """
    refused: list[Refused] = []
    skips = ReasonCounts()
    values, widths, offsets, kept = _readable(records, max_record_bytes, refused, skips if skip_tombstones else None)
    envelopes = records.envelopes or None
    if envelopes is not None and kept is not None:
        envelopes = [envelopes[at] for at in kept]
    if samples_per_record == 1:
        samples = SampleBytes.unpacked(values, widths)
    else:
        packs, whole = [], []
        for at, value in enumerate(values):
            try:
                packs.append(unpack(value, samples_per_record))
            except SampleError as exc:
                refused.append(Refused(int(offsets[at]), str(exc), 1, True, "not_packed"))
            else:
                whole.append(at)
        samples = SampleBytes.packed(packs)
        counts = [pack.num_samples for pack in packs]
        offsets = np.repeat(offsets[whole], counts)
        if envelopes is not None:
            envelopes = [envelopes[at] for at, count in zip(whole, counts, strict=True) for _ in range(count)]
    origins = Origins(offsets, records.partition, envelopes)
    with np.errstate(all="ignore"):  # a task's log of a negative number is a NaN, which is refused
        bulk = decode_in_bulk(task, samples, origins)
        reasons: dict[int, str] = {}
        rows = _one_by_one(task, samples, origins, bulk.left.tolist(), reasons, bulk.skipped)
    x, y, places = _combined(bulk.parts, rows, reasons)
    if reasons:
        refused += _by_record(offsets, reasons)
    refused.sort(key=lambda item: item.offset)
    for _, reason in sorted(bulk.skipped.items()):
        skips.add(reason)
    return Decoded(x, y, offsets[places], refused, skips.in_order())


def _readable(
    records: RawRecords, max_record_bytes: int, refused: list[Refused], skips: ReasonCounts | None
) -> tuple[list[bytes], list[int], npt.NDArray[np.int64], list[int] | None]:
    """The values that are neither empty nor too long, their lengths, their offsets, and which these are, None for all.

    The others are refused, but for those without a value where `skips` is given, which counts them.
    """
    values = list(records.values)
    widths = [len(value) if value else 0 for value in values]
    offsets = _int64(records.offsets)
    if len(offsets) != len(values):
        raise ValueError(f"expected as many offsets as values, got {len(offsets)} and {len(values)}")
    if not widths or (min(widths) > 0 and max(widths) <= max_record_bytes):
        return cast(list[bytes], values), widths, offsets, None
    kept = []
    for at, width in enumerate(widths):
        if width == 0 and isinstance(value := values[at], UnreadValue):
            refused.append(Refused(int(offsets[at]), value.reason, 1, True, value.code))
        elif values[at] is None and skips is not None:
            skips.add(TOMBSTONE)
        elif width == 0:
            refused.append(Refused(int(offsets[at]), "empty value: expected a sample", 1, True, "empty"))
        elif width > max_record_bytes:
            reason = f"record of {width} bytes: expected at most {max_record_bytes} (data.max_record_bytes)"
            refused.append(Refused(int(offsets[at]), reason, 1, True, "too_long"))
        else:
            kept.append(at)
    return [cast(bytes, values[at]) for at in kept], [widths[at] for at in kept], offsets[kept], kept


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


def _one_by_one(
    task: Task,
    samples: SampleBytes,
    origins: Origins,
    places: Sequence[int],
    reasons: dict[int, str],
    skipped: dict[int, str],
) -> list[_Row]:
    """The samples at these places that can be used; `reasons` and `skipped` get why others are not, by place."""
    rows: list[_Row] = []
    for place in places:
        try:
            if task.decodes_records:
                offset = int(origins.offsets[place])
                record = record_of(samples[place], origins.envelope(place), origins.partition, offset)
                sample = task.decode_record(record)
            else:
                sample = task.decode(samples[place])
            rows += [(place, *_check(task, item)) for item in _several(task, sample)]
        except NOT_OF_RECORDS:
            raise
        except SkipRecord as exc:
            skipped[place] = str(exc) or "no reason given"
        except BaseException as exc:  # whatever the user's decode raises: also sys.exit, and a panic of a Rust library
            text = str(exc) if isinstance(exc, SampleError) else f"{type(exc).__name__}: {exc}"
            reasons[place] = text[:MAX_REASON_CHARS]
    return rows


def _several(task: Task, made: Sample | list[Sample]) -> list[Sample]:
    """The samples that one value gives.

    Raises:
        SampleError: they are more than the task may give.
        SkipRecord: there is none.
    """
    most = task.max_samples_per_record
    if not isinstance(made, list) or (most == 1 and not (made and isinstance(made[0], Sample))):
        return [cast(Sample, made)]
    if len(made) > most:
        raise SampleError(f"gives {len(made)} samples: expected at most {most} (max_samples_per_record of the task)")
    if not made:
        raise SkipRecord(NO_SAMPLE)
    return made


def _combined(
    parts: Sequence[Part], rows: list[_Row], reasons: dict[int, str]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]]:
    """x and y of all usable samples, in order, and which values they come from; `reasons` gets why values do not suit
    the others."""
    if len(parts) == 1 and not rows:
        return parts[0].x, parts[0].y, parts[0].places
    forms = {(part.x.dtype, part.x.shape[1:], part.y.dtype, part.y.shape[1:]) for part in parts}
    forms |= {(x.dtype, x.shape, y.dtype, y.shape) for _, x, y in rows}
    if len(forms) > 1:  # what most of the batch have decides, as if all of it had been decoded one by one
        rows = rows + [row for part in parts for row in zip(part.places.tolist(), part.x, part.y, strict=True)]
        rows = _same_kind(_same_shape(sorted(rows, key=lambda row: row[0]), reasons), reasons)
        rows = [row for row in rows if row[0] not in reasons]  # of a value whose other samples do not suit
        parts = []
    if rows:
        places = np.array([place for place, _, _ in rows], np.int64)
        x = as_features(np.stack([x for _, x, _ in rows]))
        parts = [*parts, Part(places, x, np.stack([y for _, _, y in rows]))]
    if not parts:
        return np.zeros((0,), np.float32), np.zeros((0,), np.float32), np.zeros((0,), np.int64)
    places = np.concatenate([part.places for part in parts])
    order = np.argsort(places, kind="stable")  # several samples of one value stay in order
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
    """Samples with integers among samples with floats: integers become floats, where that does not change them."""
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
