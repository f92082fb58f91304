"""Samples as Kafka records in MessagePack: pairs (x, y) of arrays, or of dicts, tuples and lists of arrays, with weight
and group. `doll.train` sends the samples of a program in this form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from doll.errors import SampleError, SkipRecord
from doll.task import trees
from doll.task.base import Sample, Samples, Task
from doll.task.forms import NO_GROUP, array_of, group_of, weight_of
from doll.task.records import Record, Records
from doll.task.trees import from_plain, objects

KINDS: Final = "biuf"  # kinds of numpy types: boolean, integer, unsigned, floating


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str  # as `numpy.dtype.str`
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> npt.NDArray[Any]:
        try:
            dtype = np.dtype(self.kind)
            if dtype.kind not in KINDS:
                raise TypeError(f"{self.kind} is no type of numbers")
            # A copy, because torch cannot write to the bytes of a record.
            return np.frombuffer(self.data, dtype).reshape(self.shape).copy()
        except (TypeError, ValueError) as exc:
            raise SampleError(f"expected an array of numbers: {exc}") from exc


class _Pair(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A sample whose x and y are one array each, without weight and group."""

    x: _Array
    y: _Array


class _Trees(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A sample whose x and y are in the form of `doll.task.trees.plain_of`, with indexes of `arrays` as numbers."""

    arrays: list[_Array]
    x: Any
    y: Any
    weight: float
    group: int | str | None


_PAIR: Final = b"\x92"  # MessagePack's first byte of an array of two
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Pair)
_tree_decoder = msgspec.msgpack.Decoder(_Trees)


def encode(x: Any, y: Any, weight: float = 1.0, group: int | str | None = None) -> bytes:
    """Encode a sample as a record. `doll.Sample` describes the arguments; named tuples are encoded as tuples.

    Args:
        x, y: numbers, or values that numpy or torch convert to an array of numbers; or dicts, tuples and lists of them.

    Raises:
        TypeError: x or y contains a value of another type.
        SampleError: weight or group is not valid, or the conversion to an array would change an integer in a list.
    """
    (xs, x_structure), (ys, y_structure) = trees.parts_of(x), trees.parts_of(y)
    if x_structure is None and y_structure is None and weight == 1 and group is None:
        return _encoder.encode(_Pair(_array_of(x, "x"), _array_of(y, "y")))
    if group is not None:
        number = group_of(group)
        group = group if isinstance(group, str) else number  # also for integers of numpy types
    names = [*trees.names("x", x_structure), *trees.names("y", y_structure)]
    arrays = [_array_of(leaf, name) for leaf, name in zip((*xs, *ys), names, strict=True)]
    places = range(len(arrays))
    x_plain = trees.plain_of(trees.tree_of(x_structure, places[: len(xs)]))
    y_plain = trees.plain_of(trees.tree_of(y_structure, places[len(xs) :]))
    return _encoder.encode(_Trees(arrays, x_plain, y_plain, weight_of(weight), group))


def _array_of(value: Any, name: str) -> _Array:
    if hasattr(value, "detach"):  # a tensor, on any device
        value = value.detach().cpu().numpy()
    array = array_of(value, name, np.float32 if name[0] == "x" else np.float64)
    if array.dtype.kind not in KINDS:
        raise TypeError(f"{name}: expected numbers, got {array.dtype} ({type(value).__name__})")
    return _Array(array.dtype.str, array.shape, array.tobytes())


def decode(record: bytes) -> Sample:
    """Decode the sample of a record.

    Raises:
        SampleError: the record was not made by `encode`.
    """
    try:
        sample = _parsed(record)
        arrays = [array.array() for array in sample.arrays]
        return Sample(from_plain(sample.x, arrays), from_plain(sample.y, arrays), sample.weight, sample.group)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise SampleError(f"expected a sample of arrays: {exc}") from exc


def _parsed(record: bytes) -> _Trees:
    if record[:1] != _PAIR:
        return _tree_decoder.decode(record)
    pair = _decoder.decode(record)
    return _Trees([pair.x, pair.y], 0, 1, 1.0, None)


def decode_many(values: Sequence[bytes], *, is_ragged: bool = False) -> Samples | None:
    """Decode records of one structure whose arrays have equal types and shapes. Return None for other records.

    `is_ragged`: arrays of different shapes are allowed, and become one array of objects.
    """
    try:
        samples = list(map(_parsed, values))
        first = samples[0]
        if any((item.x, item.y, len(item.arrays)) != (first.x, first.y, len(first.arrays)) for item in samples):
            return None
        columns = [_column(column, is_ragged) for column in zip(*(item.arrays for item in samples), strict=True)]
        if any(column is None for column in columns):
            return None
        has_weights = any(item.weight != 1 for item in samples)
        has_groups = any(item.group is not None for item in samples)
        return Samples(
            from_plain(first.x, columns),
            from_plain(first.y, columns),
            weight=np.array([item.weight for item in samples]) if has_weights else None,
            group=np.array([_group(item.group) for item in samples]) if has_groups else None,
        )
    except (msgspec.MsgspecError, RecursionError, SampleError):
        return None


def _group(group: int | str | None) -> int:
    return NO_GROUP if group is None else group_of(group)


def _column(arrays: Sequence[_Array], is_ragged: bool) -> npt.NDArray[Any] | None:
    """Combine the arrays that all samples have for one leaf of their tree."""
    first = arrays[0]
    if any(array.kind != first.kind or array.shape != first.shape for array in arrays):
        return objects([array.array() for array in arrays]) if is_ragged else None
    return _Array(first.kind, (len(arrays), *first.shape), b"".join(array.data for array in arrays)).array()


class PairTask(Task):
    """A task whose records are pairs of arrays, for classes that do not decode records themselves."""

    holdout_file: Path | None = None  # records with their lengths, see `write_records`
    holdout_are_pairs: bool = True  # False: the task decodes the records itself

    def decode(self, record: bytes) -> Sample:
        return decode(record)

    def decode_many(self, values: Records) -> Samples | None:
        return decode_many(values, is_ragged=self.is_ragged)

    def holdout(self) -> Iterable[Sample | list[Sample]]:  # type: ignore[override]
        for record in () if self.holdout_file is None else read_records(self.holdout_file):
            with contextlib.suppress(SkipRecord):
                yield decode(record) if self.holdout_are_pairs else self.decode_record(Record(record))


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Write records to a file."""
    with path.open("wb") as file:
        for record in records:
            file.write(len(record).to_bytes(4, "little") + record)


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file that `write_records` wrote."""
    with path.open("rb") as file:
        while head := file.read(4):
            yield file.read(int.from_bytes(head, "little"))
