"""Samples as Kafka records: pairs (x, y) of arrays in MessagePack, as `doll.train` sends what a program gives it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from doll.errors import SampleError
from doll.task.base import Sample, Task
from doll.task.records import Records

KINDS: Final = "biuf"  # of numpy's types: boolean, integer, unsigned, floating


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str  # as `numpy.dtype.str`
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> npt.NDArray[Any]:
        try:
            dtype = np.dtype(self.kind)
            if dtype.kind not in KINDS:
                raise TypeError(f"{self.kind} is no type of numbers")
            return np.frombuffer(self.data, dtype).reshape(self.shape)
        except (TypeError, ValueError) as exc:
            raise SampleError(f"expected an array of numbers: {exc}") from exc


class _Pair(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    x: _Array
    y: _Array


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Pair)


def encode(x: Any, y: Any) -> bytes:
    """The record of a sample.

    Args:
        x, y: numbers, or what numpy or torch make an array of numbers of.

    Raises:
        TypeError: one of them is something else.
    """
    return _encoder.encode(_Pair(_of(x, "x"), _of(y, "y")))


def _of(value: Any, name: str) -> _Array:
    if hasattr(value, "detach"):  # a tensor, of whatever device
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in KINDS:
        raise TypeError(f"{name}: expected numbers, got {array.dtype} ({type(value).__name__})")
    return _Array(array.dtype.str, array.shape, array.tobytes())


def decode(record: bytes) -> Sample:
    """The sample of a record.

    Raises:
        SampleError: `encode` did not make it.
    """
    try:
        pair = _decoder.decode(record)
    except msgspec.MsgspecError as exc:
        raise SampleError(f"expected a pair of arrays: {exc}") from exc
    return Sample(pair.x.array(), pair.y.array())


def decode_many(values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """The samples of records whose arrays have one type and shape, x of shape (n, ...) and y; None for other ones."""
    try:
        pairs = [_decoder.decode(value) for value in values]
    except msgspec.MsgspecError:
        return None
    x, y = _stacked([pair.x for pair in pairs]), _stacked([pair.y for pair in pairs])
    return None if x is None or y is None else (x, y)


def _stacked(arrays: Sequence[_Array]) -> npt.NDArray[Any] | None:
    first = arrays[0]
    if any(array.kind != first.kind or array.shape != first.shape for array in arrays):
        return None
    whole = _Array(first.kind, (len(arrays), *first.shape), b"".join(array.data for array in arrays))
    try:
        return whole.array()
    except SampleError:
        return None


class PairTask(Task):
    """A task whose records are pairs of arrays, for classes that do not decode records themselves."""

    holdout_file: Path | None = None  # pairs, each behind its length, see `write_pairs`

    def decode(self, record: bytes) -> Sample:
        return decode(record)

    def decode_many(self, values: Records) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        return decode_many(values)

    def holdout(self) -> Iterable[Sample]:
        return () if self.holdout_file is None else read_pairs(self.holdout_file)


def write_pairs(path: Path, pairs: Iterable[tuple[Any, Any]]) -> int:
    """Write samples to a file; returns how many.

    Raises:
        TypeError: one of them is not a pair of numbers or arrays.
    """
    count = 0
    with path.open("wb") as file:
        for x, y in pairs:
            record = encode(x, y)
            file.write(len(record).to_bytes(4, "little") + record)
            count += 1
    return count


def read_pairs(path: Path) -> Iterable[Sample]:
    """The samples of such a file.

    Raises:
        SampleError: it is damaged.
    """
    with path.open("rb") as file:
        while head := file.read(4):
            yield decode(file.read(int.from_bytes(head, "little")))
