"""A `Task` whose records are JSON objects, decoded a batch at a time with msgspec and numpy.

import msgspec
import numpy as np
from doll import JsonTask

class Event(msgspec.Struct):
    age: float
    visits: int
    left: bool

class Churn(JsonTask):
    record = Event
    input_shape = (2,)
    num_classes = 2

    def samples(self, columns):
        x = np.stack([columns["age"] / 50, columns["visits"] / 10], axis=1)
        return x, columns["left"]
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, TypeAlias, Union, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from doll.errors import BadRecordsError
from doll.task.base import Sample, Task

Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]

_DTYPES: Final[dict[Any, Any]] = {bool: np.bool_, int: np.int64, float: np.float64}


class JsonTask(Task):
    """A task on JSON objects. Subclass it; `record`, `samples` and `build_model` must be written.

    A record that lacks a field without a default, or has a value of another type in it, is dead-lettered. Fields that
    `record` does not name are ignored.

    Attributes:
        record: a `msgspec.Struct` that names the fields that are used and their types.
    """

    record: ClassVar[type[msgspec.Struct]]

    def samples(self, columns: Columns) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The samples of n records, n >= 1. Row i must depend on record i only.

        Args:
            columns: one array for each field of `record`: float64 for `float` and `float | None` (NaN where there is
                None), int64 for `int`, booleans for `bool`, shape (n,); for lists of these, shape (n, length);
                objects for all other types.

        Returns:
            Arrays: x of shape (n, *input_shape) and y of shape (n, ...).
        """
        raise NotImplementedError(f"{type(self).__name__} must define samples(columns)")

    def decode(self, record: bytes) -> Sample:
        decode, _ = _compiled(self.record)
        x, y = self._arrays([decode(record)])
        return Sample(x[0], y[0])

    def decode_many(self, values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        decode, _ = _compiled(self.record)
        try:
            events = [decode(value) for value in values]
        except (ValueError, RecursionError):  # msgspec's errors, text that is not UTF-8, lists in lists in lists
            raise BadRecordsError(_refused_by(decode, values)) from None
        return self._arrays(events)

    def _arrays(self, events: list[msgspec.Struct]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        _, fields = _compiled(self.record)
        x, y = self.samples({name: _column(list(map(get, events)), dtype) for name, get, dtype in fields})
        return np.asarray(x), np.asarray(y)


def _refused_by(decode: Callable[[bytes], Any], values: Sequence[bytes]) -> Iterator[int]:
    for position, value in enumerate(values):
        try:
            decode(value)
        except (ValueError, RecursionError):
            yield position


@cache
def _compiled(record: type[msgspec.Struct]) -> Any:
    """The decoder of one object; name, getter and numpy's type of each field."""
    fields = [(field.name, attrgetter(field.name), _dtype(field.type)) for field in msgspec.structs.fields(record)]
    return msgspec.json.Decoder(record).decode, fields


def _dtype(kind: Any) -> Any:
    """numpy's type of a column for a field of this type; object where no number is declared."""
    kind = _without_bounds(kind)
    if get_origin(kind) is list:
        return _dtype(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [_without_bounds(option) for option in get_args(kind) if option is not type(None)]
        return np.float64 if kinds == [float] else np.object_
    return _DTYPES.get(kind, np.object_)


def _without_bounds(kind: Any) -> Any:
    """`float` for `Annotated[float, msgspec.Meta(ge=0)]`."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _column(values: list[Any], dtype: Any) -> npt.NDArray[Any]:
    if dtype is not np.object_:
        return np.array(values, dtype)
    column = np.empty(len(values), np.object_)  # np.array would take lists of lists apart
    column[:] = values
    return column
