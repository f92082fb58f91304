"""Records to tensors: what can be used goes into the batch, what cannot is refused with a reason. Nothing raises.

A task's `decode_block` is tried first, on all records at once; only where it refuses, records are looked at one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.errors import SampleError
from doll.packing import unpack
from doll.records import DeadLetterCode
from doll.task import Sample, Task, as_features, as_target

MAX_REASON_CHARS = 500
_NUMERIC_KINDS = "biufc"  # numpy's kinds: boolean, integer, unsigned, floating, complex
_Row = tuple[int, npt.NDArray[Any], npt.NDArray[Any]]  # offset, x, y


class Records(NamedTuple):
    """The records of one batch, not decoded: value i is the record at offset i. In offset order, of one length."""

    offsets: Sequence[int]
    values: Sequence[bytes | None]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, bytes | None]]) -> Records:
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
        samples_per_record: m; above 1, each value is a packed record (`doll.packing`) of at most m samples.
        max_record_bytes: a longer record is refused unread.
    """
    refused: list[Refused] = []
    pieces: list[tuple[int, list[bytes], memoryview | None, int]] = []  # offset, samples, block, width
    for offset, value in zip(*records, strict=True):
        if not value:
            refused.append(Refused(offset, "empty value: expected a sample", 1, True, "empty"))
        elif len(value) > max_record_bytes:
            reason = f"record of {len(value)} bytes: expected at most {max_record_bytes} (data.max_record_bytes)"
            refused.append(Refused(offset, reason, 1, True, "too_long"))
        elif samples_per_record == 1:
            pieces.append((offset, [value], memoryview(value), len(value)))
        else:
            try:
                packed = unpack(value, samples_per_record)
            except SampleError as exc:
                refused.append(Refused(offset, str(exc), 1, True, "not_packed"))
            else:
                pieces.append((offset, packed.samples() if not packed.width else [], packed.body, packed.width))
    decoded = _decode_block(task, pieces) or _one_by_one(task, pieces, refused)
    refused.sort(key=lambda item: item.offset)
    decoded.refused = refused
    return decoded


def refuse(decoded: Decoded, bad: Mapping[int, str]) -> list[Refused]:
    """The records of the samples at these places of the batch, which are refused after decoding.

    A record of which nothing is left is refused as a whole, with the samples that decoding had refused already.
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


def _decode_block(task: Task, pieces: Sequence[tuple[int, list[bytes], memoryview | None, int]]) -> Decoded | None:
    """All records in one go, if they are of one width, the task can, and every sample is good."""
    widths = {width for _, _, _, width in pieces}
    if len(widths) != 1 or 0 in widths:
        return None
    (width,) = widths
    blocks = [block for _, _, block, _ in pieces if block is not None]
    block = blocks[0] if len(blocks) == 1 else memoryview(b"".join(blocks))
    try:
        pair = task.decode_block(block, width)
        if pair is None:
            return None
        x, y = as_features(pair[0]), as_target(pair[1])
        if not _all_good(task, x, y, len(block) // width):
            return None
        counts = [len(block) // width for _, _, block, _ in pieces if block is not None]
        return Decoded(x, y, np.repeat(np.array([offset for offset, *_ in pieces], np.int64), counts))
    except Exception:  # the user's code may raise or return anything; decoding record by record gives the reasons
        return None


def _all_good(task: Task, x: npt.NDArray[Any], y: npt.NDArray[Any], count: int) -> bool:
    """The checks of `_check`, on all `count` samples in one go."""
    if x.dtype.kind not in _NUMERIC_KINDS or y.dtype.kind not in _NUMERIC_KINDS or not len(x) == len(y) == count:
        return False
    if task.input_shape is not None and x.shape[1:] != task.input_shape:
        return False
    if any(np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all() for array in (x, y)):
        return False
    if task.num_classes is None or count == 0:
        return True
    return y.ndim == 1 and bool(((y >= 0) & (y < task.num_classes) & (np.floor(y) == y)).all())


def _one_by_one(
    task: Task, pieces: Sequence[tuple[int, list[bytes], memoryview | None, int]], refused: list[Refused]
) -> Decoded:
    rows: list[_Row] = []
    reasons: dict[int, list[str]] = {}
    totals: Counter[int] = Counter()
    for offset, samples, block, width in pieces:
        if not samples and block is not None:
            samples = [bytes(block[at : at + width]) for at in range(0, len(block), width)]
        totals[offset] += len(samples)
        for sample in samples:
            try:
                rows.append((offset, *_check(task, task.decode(sample))))
            except Exception as exc:  # whatever the user's decode raises is the reason
                text = str(exc) if isinstance(exc, SampleError) else f"{type(exc).__name__}: {exc}"
                reasons.setdefault(offset, []).append(text[:MAX_REASON_CHARS])
    rows = _same_kind(_same_shape(rows, reasons), reasons)
    for offset, texts in reasons.items():
        refused.append(Refused(offset, texts[0], len(texts), len(texts) == totals[offset]))
    if not rows:
        return Decoded(np.zeros((0,), np.float32), np.zeros((0,), np.float32), np.zeros((0,), np.int64))
    offsets = np.array([offset for offset, _, _ in rows], np.int64)
    return Decoded(as_features(np.stack([x for _, x, _ in rows])), np.stack([y for _, _, y in rows]), offsets)


def _check(task: Task, sample: Sample | tuple[Any, Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    x, y = as_features(sample[0]), as_target(sample[1])
    for name, array in (("x", x), ("y", y)):
        if array.dtype.kind not in _NUMERIC_KINDS:
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


def _same_kind(rows: list[_Row], reasons: dict[int, list[str]]) -> list[_Row]:
    """Samples with integers among samples with floats: integers become floats, where that does not change them."""
    xs = _one_kind([x for _, x, _ in rows], 1 << 24)  # up to there float32 holds every integer
    ys = _one_kind([y for _, _, y in rows], 1 << 53)
    kept = []
    for (offset, *values), x, y in zip(rows, xs, ys, strict=True):
        if x is not None and y is not None:
            kept.append((offset, x, y))
        else:
            name, value = ("x", values[0]) if x is None else ("y", values[1])
            text = f"expected integers in {name} as most of the batch, got {value.ravel()[:4].tolist()}"
            reasons.setdefault(offset, []).append(text[:MAX_REASON_CHARS])
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


def _same_shape(rows: list[_Row], reasons: dict[int, list[str]]) -> list[_Row]:
    """Without a declared shape, the shape that most samples of the batch have is the right one."""
    shapes = Counter((x.shape, y.shape) for _, x, y in rows)
    if len(shapes) <= 1:
        return rows
    (usual, _) = shapes.most_common(1)[0]
    kept = []
    for offset, x, y in rows:
        if (x.shape, y.shape) == usual:
            kept.append((offset, x, y))
        else:
            text = f"expected x {usual[0]} and y {usual[1]} as most of the batch, got x {x.shape} and y {y.shape}"
            reasons.setdefault(offset, []).append(text)
    return kept
