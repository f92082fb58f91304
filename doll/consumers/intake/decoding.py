"""Decoding of records to arrays: usable samples enter the batch, and other samples are refused with a reason. An
exception of the task is raised only if its cause is not a record.

Bulk decoding (`bulk`) is tried first. The remaining records are decoded one by one, and only this second step refuses
samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from doll.consumers.intake.bulk import NOT_OF_RECORDS, Origins, Part, SampleBytes, checked, decode_in_bulk
from doll.errors import SampleError, SkipRecord
from doll.records.bounded import printable
from doll.records.control import DeadLetterCode
from doll.records.packing import unpack
from doll.records.refusals import ReasonCounts, UnreadValue
from doll.task import trees
from doll.task.base import Sample, Task
from doll.task.batches import Forms, SampleBatch, SampleRow, batch_of_rows, fitted, joined
from doll.task.forms import Form, as_integers, beyond
from doll.task.holdout import Split
from doll.task.records import Envelope, record_of
from doll.task.trees import Tree

MAX_REASON_CHARS = 500
TOMBSTONE = "tombstone"
NO_SAMPLE = "no sample"
_Row = tuple[int, SampleRow]  # position of the value in the batch, and its sample


class RawRecords(NamedTuple):
    """The undecoded records of one batch: value i is the record at offset i. Offsets ascend.

    `envelopes`: one for each value; empty if the task does not read them.
    """

    offsets: Sequence[int]
    values: Sequence[bytes | None]
    partition: int = 0
    envelopes: Sequence[Envelope | None] = ()


@dataclass(frozen=True, slots=True)
class RefusedSamples:
    """The unusable samples of one record. `whole`: no sample of the record is usable."""

    offset: int
    reason: str
    samples: int
    whole: bool
    code: DeadLetterCode = "undecodable"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(" ".join(self.reason.split())))


@dataclass(slots=True)
class DecodedBatch:
    """The usable samples of a batch, in stream order. x, y, weight and group are as in `doll.task.batches.SampleBatch`.

    `offsets`, int64, shape (n,): the offset of each sample's record. `skipped`: (reason, number) of samples that the
    task has left out. `held_out`: offsets of records that are not learned, whose samples are not among these but in
    `held_out_samples`, as far as they are scored.
    """

    x: Tree
    y: Tree
    offsets: npt.NDArray[np.int64]
    refused: list[RefusedSamples] = field(default_factory=list)
    skipped: tuple[tuple[str, int], ...] = ()
    weight: npt.NDArray[np.float32] | None = None
    group: npt.NDArray[np.int64] | None = None
    held_out: tuple[int, ...] = ()
    held_out_samples: SampleBatch | None = None

    @property
    def num_samples(self) -> int:
        return len(self.offsets)

    @property
    def samples(self) -> SampleBatch:
        return SampleBatch(self.x, self.y, self.weight, self.group)

    def without_held_out(self, records: RawRecords, split: Split) -> DecodedBatch:
        """Return the batch whose held-out records are apart. `records` are those of this batch, with envelopes."""
        mask = split.held_out(records.partition, records.offsets, records.values, records.envelopes)
        if not mask.any():
            return self
        dead = {item.offset for item in self.refused if item.whole}
        held_out = [at for at in np.flatnonzero(mask).tolist() if records.offsets[at] not in dead]
        offsets = [records.offsets[at] for at in held_out]
        final = [records.offsets[at] for at in held_out if split.has_final_label(records.values[at])]
        learned = np.flatnonzero(~np.isin(self.offsets, offsets)).tolist()
        scored = np.flatnonzero(np.isin(self.offsets, final)).tolist()
        x, y, weight, group = self.samples.take(learned)
        samples = self.samples.take(scored) if scored else None
        return DecodedBatch(
            x, y, self.offsets[learned], self.refused, self.skipped, weight, group, tuple(offsets), samples
        )


class SeenForms:
    """The form that samples must have. If the task declares a form, it is this form. Otherwise, if x or y has several
    arrays or samples may differ in shape, it is the form of the first good samples of this process. Not thread-safe."""

    def __init__(self, task: Task) -> None:
        """Start with the task's declaration. Raise ConfigError if `Task.spec` does not return fields."""
        self.forms = Forms.from_task(task)

    def see(self, rows: Sequence[SampleRow]) -> None:
        """Store the form of these good samples, which all have one structure. Later samples must have the same form."""
        x, y, is_ragged = self.forms
        first = rows[0]
        if x is None and (is_ragged or first.x_structure is not None):
            x = Form.seen("x", first.x_structure, [row.x for row in rows], of_any_length=is_ragged)
        if y is None and (is_ragged or first.y_structure is not None):
            y = Form.seen("y", first.y_structure, [row.y for row in rows], of_any_length=is_ragged)
        self.forms = Forms(x, y, is_ragged)

    def see_part(self, samples: SampleBatch) -> None:
        """Store the form of stacked samples, as in `see`."""
        x, y, _ = self.forms
        if (x is None and trees.is_container(samples.x)) or (y is None and trees.is_container(samples.y)):
            self.see(samples.rows(1))


def decode_records(
    task: Task, records: RawRecords, *, samples_per_record: int, max_record_bytes: int, skip_tombstones: bool = False,
    seen: SeenForms | None = None,
) -> DecodedBatch:  # fmt: skip
    """Decode the records of one batch.

    Args:
        samples_per_record: m; above 1, each value is a packed record (`doll.records.packing`) of at most m samples.
        max_record_bytes: maximum length of a record. A longer record is refused without decoding.
        skip_tombstones: True: a record without a value is skipped instead of refused.
        seen: the form of the samples, from the batches before. None: this is the first batch.

    Raises:
        RetryLater, TaskError, ConfigError: raised by the task. In this case, no part of the batch is decoded.
    """
    refused: list[RefusedSamples] = []
    skips = ReasonCounts()
    seen = SeenForms(task) if seen is None else seen
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
                refused.append(RefusedSamples(int(offsets[at]), str(exc), 1, True, "not_packed"))
            else:
                whole.append(at)
        samples = SampleBytes.packed(packs)
        counts = [pack.num_samples for pack in packs]
        offsets = np.repeat(offsets[whole], counts)
        if envelopes is not None:
            envelopes = [envelopes[at] for at, count in zip(whole, counts, strict=True) for _ in range(count)]
    origins = Origins(offsets, records.partition, envelopes)
    with np.errstate(all="ignore"):  # for instance, a task's log of a negative number is NaN, which is refused
        bulk = decode_in_bulk(task, samples, origins, seen.forms)
        reasons: dict[int, str] = {}
        rows = _one_by_one(task, samples, origins, bulk.left.tolist(), reasons, bulk.skipped, seen.forms)
    batch, places = _combined(bulk.parts, rows, reasons, seen)
    if reasons:
        refused += _by_record(offsets, reasons)
    refused.sort(key=lambda item: item.offset)
    for _, reason in sorted(bulk.skipped.items()):
        skips.add(reason)
    x, y, weight, group = batch
    return DecodedBatch(x, y, offsets[places], refused, skips.in_order(), weight, group)


def _readable(
    records: RawRecords, max_record_bytes: int, refused: list[RefusedSamples], skips: ReasonCounts | None
) -> tuple[list[bytes], list[int], npt.NDArray[np.int64], list[int] | None]:
    """Return the values that are neither empty nor too long, their lengths, their offsets and their positions (None:
    all values).

    Other values are refused. If `skips` is given, missing values are counted in `skips` instead of refused.
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
            refused.append(RefusedSamples(int(offsets[at]), value.reason, 1, True, value.code))
        elif values[at] is None and skips is not None:
            skips.add(TOMBSTONE)
        elif width == 0:
            refused.append(RefusedSamples(int(offsets[at]), "empty value: expected a sample", 1, True, "empty"))
        elif width > max_record_bytes:
            reason = f"record of {width} bytes: expected at most {max_record_bytes} (data.max_record_bytes)"
            refused.append(RefusedSamples(int(offsets[at]), reason, 1, True, "too_long"))
        else:
            kept.append(at)
    return [cast(bytes, values[at]) for at in kept], [widths[at] for at in kept], offsets[kept], kept


def _int64(offsets: Sequence[int]) -> npt.NDArray[np.int64]:
    if isinstance(offsets, range):
        return np.arange(offsets.start, offsets.stop, offsets.step, dtype=np.int64)
    return np.array(offsets, np.int64)


def refuse(decoded: DecodedBatch, bad: Mapping[int, str]) -> list[RefusedSamples]:
    """Return the records of the samples at the positions `bad`, which are refused after decoding.

    A record without any usable sample is refused as a whole, including samples that decoding had already refused.
    """
    reasons: dict[int, list[str]] = {}
    for at, reason in sorted(bad.items()):
        reasons.setdefault(int(decoded.offsets[at]), []).append(reason)
    before = {item.offset: item.samples for item in decoded.refused}
    refused = []
    for offset, texts in sorted(reasons.items()):
        whole = len(texts) == int((decoded.offsets == offset).sum())
        samples = len(texts) + (before.get(offset, 0) if whole else 0)
        refused.append(RefusedSamples(offset, texts[0][:MAX_REASON_CHARS], samples, whole, "harmful"))
    return refused


def _one_by_one(
    task: Task,
    samples: SampleBytes,
    origins: Origins,
    places: Sequence[int],
    reasons: dict[int, str],
    skipped: dict[int, str],
    forms: Forms,
) -> list[_Row]:
    """Return the usable samples of these positions. Add the reasons for the other samples to `reasons` or `skipped`, by
    position."""
    rows: list[_Row] = []
    for place in places:
        try:
            if task.decodes_records:
                offset = int(origins.offsets[place])
                record = record_of(samples[place], origins.envelope(place), origins.partition, offset)
                sample = task.decode_record(record)
            else:
                sample = task.decode(samples[place])
            rows += [(place, checked(task, item, forms)) for item in _several(task, sample)]
        except NOT_OF_RECORDS:
            raise
        except SkipRecord as exc:
            skipped[place] = str(exc) or "no reason given"
        except BaseException as exc:  # user code may raise anything: sys.exit, or a panic of a Rust library
            text = str(exc) if isinstance(exc, SampleError) else f"{type(exc).__name__}: {exc}"
            reasons[place] = text[:MAX_REASON_CHARS]
    return rows


def _several(task: Task, made: Sample | list[Sample]) -> list[Sample]:
    """Return the samples of one value. Raise SampleError if there are more samples than the task may return, and
    SkipRecord if there are none."""
    most = task.max_samples_per_record
    if not isinstance(made, list) or (most == 1 and not (made and isinstance(made[0], Sample))):
        return [cast(Sample, made)]
    if len(made) > most:
        raise SampleError(f"gives {len(made)} samples: expected at most {most} (max_samples_per_record of the task)")
    if not made:
        raise SkipRecord(NO_SAMPLE)
    return made


def _combined(
    parts: Sequence[Part], rows: list[_Row], reasons: dict[int, str], seen: SeenForms
) -> tuple[SampleBatch, npt.NDArray[np.int64]]:
    """Return all usable samples, in order, and the positions of their values. If a sample does not fit the others, add
    the reason to `reasons`."""
    is_ragged = seen.forms.is_ragged
    if len(parts) == 1 and not rows and not is_ragged:
        seen.see_part(parts[0].samples)
        return parts[0].samples, parts[0].places
    forms = {_form(part.samples.rows(1)[0]) for part in parts} | {_form(row) for _, row in rows}
    if len(forms) > 1 or is_ragged:
        # The majority of the batch decides, as if all samples had been decoded one by one.
        rows = rows + [row for part in parts for row in zip(part.places.tolist(), part.samples.rows(), strict=True)]
        rows = _same_kind(_same_shape(sorted(rows, key=itemgetter(0)), reasons, is_ragged), reasons)
        rows = [row for row in rows if row[0] not in reasons]  # drop all samples of a value with a bad one
        parts = []
    if rows:
        good = [row for _, row in rows]
        seen.see(good)
        if seen.forms.x is not None or seen.forms.y is not None:
            good = [fitted(row, seen.forms) for row in good]
        batch = batch_of_rows(good, is_ragged=is_ragged)
        parts = [*parts, Part(np.array([place for place, _ in rows], np.int64), batch)]
    if not parts:
        return SampleBatch(np.zeros((0,), np.float32), np.zeros((0,), np.float32)), np.zeros((0,), np.int64)
    if len(parts) == 1:
        return parts[0].samples, parts[0].places
    seen.see_part(parts[0].samples)
    places = np.concatenate([part.places for part in parts])
    order = np.argsort(places, kind="stable")  # several samples of one value stay in order
    return joined([part.samples for part in parts]).take(order.tolist()), places[order]


def _form(row: SampleRow) -> tuple[Any, ...]:
    """Return structure, shapes and types, which must be equal for all arrays of a batch."""
    if row.x_structure is None and row.y_structure is None:
        x, y = row.x[0], row.y[0]
        return x.dtype, x.shape, y.dtype, y.shape
    return (*row.shapes, tuple(array.dtype for array in (*row.x, *row.y)))


def _by_record(offsets: npt.NDArray[np.int64], reasons: Mapping[int, str]) -> list[RefusedSamples]:
    """Return the refused samples of each record, with the reason of the first."""
    texts: dict[int, list[str]] = {}
    for place, text in reasons.items():
        texts.setdefault(int(offsets[place]), []).append(text)
    totals = Counter(offsets.tolist())
    return [RefusedSamples(offset, own[0], len(own), len(own) == totals[offset]) for offset, own in texts.items()]


def _same_kind(rows: list[_Row], reasons: dict[int, str]) -> list[_Row]:
    """If a batch has integers and floats, convert the integers to floats, unless this changes a value."""
    if not rows:
        return rows
    for root, rounded in (("x", np.float32), ("y", np.float64)):
        names = trees.names(root, getattr(rows[0][1], f"{root}_structure"))
        for at, name in enumerate(names):
            arrays = [getattr(row, root)[at] for _, row in rows]
            given = [row.given_x[at] if root == "x" and row.given_x else getattr(row, root)[at] for _, row in rows]
            made, expected = _one_kind(arrays, given, rounded)
            for (place, row), array in zip(rows, made, strict=True):
                own = getattr(row, root)
                if array is None:
                    text = f"expected {expected} in {name} as most of the batch, got {own[at].ravel()[:4].tolist()}"
                    reasons[place] = text[:MAX_REASON_CHARS]
                else:
                    own[at] = array
    return [row for row in rows if row[0] not in reasons]


def _one_kind(
    arrays: list[npt.NDArray[Any]], given: Sequence[Any], rounded: Any
) -> tuple[list[npt.NDArray[Any] | None], str]:
    """Return the arrays converted to the type of the batch, with None for arrays that cannot be converted, and a
    description of that type.

    If most arrays contain integers, and floats cannot represent some of these (ids), the float arrays must contain
    whole numbers. `given`: the values before conversion, with their own precision. `rounded`: the type of floats.
    """
    integers = [array.dtype.kind in "biu" for array in arrays]
    count = sum(integers)
    if count in (0, len(arrays)):
        return list(arrays), ""
    held = [not integer or beyond(array, rounded) is None for array, integer in zip(arrays, integers, strict=True)]
    if all(held):
        return list(arrays), ""
    if 2 * count <= len(arrays):
        kind = f"numbers that {np.dtype(rounded)} holds"
        return [array if is_held else None for array, is_held in zip(arrays, held, strict=True)], kind
    return [
        array if integer else as_integers(np.asarray(value))
        for array, value, integer in zip(arrays, given, integers, strict=True)
    ], "integers"


def _same_shape(rows: list[_Row], reasons: dict[int, str], is_ragged: bool) -> list[_Row]:
    """Drop rows whose shape differs from most samples of the batch, if no shape is declared. If samples may differ in
    shape, compare their structure and number of dimensions."""
    shapes = Counter(row.dimensions if is_ragged else row.shapes for _, row in rows)
    if len(shapes) <= 1:
        return rows
    (usual, _) = shapes.most_common(1)[0]
    kept, example = [], next(row for _, row in rows if usual in (row.dimensions, row.shapes))
    for place, row in rows:
        if (row.dimensions if is_ragged else row.shapes) == usual:
            kept.append((place, row))
        else:
            reasons[place] = _difference(row, example)[:MAX_REASON_CHARS]
    return kept


def _difference(row: SampleRow, usual: SampleRow) -> str:
    """Return the reason why a sample does not fit the others."""
    structures = (row.x_structure, row.y_structure)
    if structures == (usual.x_structure, usual.y_structure) == (None, None):
        return (
            f"expected x {usual.x[0].shape} and y {usual.y[0].shape} as most of the batch, "
            f"got x {row.x[0].shape} and y {row.y[0].shape}"
        )
    sides = (("x", row.x_structure, row.x, usual.x_structure, usual.x),
             ("y", row.y_structure, row.y, usual.y_structure, usual.y))  # fmt: skip
    for root, structure, arrays, usual_structure, usual_arrays in sides:
        if structure != usual_structure:
            expected, got = (", ".join(trees.names(root, item)) for item in (usual_structure, structure))
            return f"expected {expected} as most of the batch, got {got}"
        for name, array, other in zip(trees.names(root, structure), arrays, usual_arrays, strict=True):
            if array.shape != other.shape:
                return f"{name}: expected shape {other.shape} as most of the batch, got {array.shape}"
    return "expected the structure of most of the batch"
