"""The samples that a program passes to `doll.train`, encoded as Kafka records."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from doll.errors import ConfigError, SampleError
from doll.task import pairs
from doll.task.base import Sample

_CHUNK: Final = 4096  # rows of a pandas DataFrame that are converted to dicts together
_EXPECTED: Final = (
    "a pair (x, y) of numbers or arrays, or of dicts, tuples and lists of these, a doll.Sample, bytes, a str, a dict, "
    "a dataclass or a msgspec.Struct for each sample; of arrays X and y (X, y)"
)


class Items(NamedTuple):
    """The samples of a program.

    Attributes:
        records: the encoded samples; each is encoded when it is requested.
        are_pairs: whether they are pairs (x, y), for a task that does not decode records itself.
    """

    records: Iterator[bytes]
    are_pairs: bool


def items_of(source: Any, argument: str = "source") -> Items:
    """Return the records of a source: any iterable, arrays (X, y), a pandas or polars DataFrame, a torch dataset.

    The first item is read immediately. It determines the kind of all items.

    Args:
        argument: name of the source in error messages.

    Raises:
        ConfigError: the source is not iterable or is empty, or its first item cannot be sent.
    """
    values = _values(source, argument)
    try:
        first = next(values)
    except StopIteration:
        raise ConfigError(f"{argument}: expected at least one sample, got none") from None
    try:
        encode = _encoder(first)
        encode(first)
    except (TypeError, SampleError) as exc:
        raise ConfigError(f"{argument}: expected {_EXPECTED}; sample 0: {exc}") from exc
    return Items(_records(itertools.chain([first], values), encode, argument), encode is _pair)


def _records(values: Iterator[Any], encode: Callable[[Any], bytes], argument: str) -> Iterator[bytes]:
    for number, value in enumerate(values):
        try:
            if _encoder(value) is not encode:
                raise TypeError(f"it is {type(value).__name__}")
            record = encode(value)
        except (TypeError, ValueError, SampleError) as exc:
            raise ConfigError(
                f"{argument}: expected {_EXPECTED}, each of the kind of the first; sample {number}: {exc}"
            ) from exc
        yield record


def _values(source: Any, argument: str) -> Iterator[Any]:
    if hasattr(source, "iter_rows") and hasattr(source, "columns"):  # polars
        return iter(source.iter_rows(named=True))
    if hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas
        chunks = (source.iloc[begin : begin + _CHUNK] for begin in range(0, len(source), _CHUNK))
        return (row for chunk in chunks for row in chunk.to_dict("records"))
    if getattr(source, "batch_sampler", None) is not None:  # a DataLoader: its batches would be treated as samples
        raise ConfigError(
            f"{argument}: expected one sample at a time, got a {type(source).__name__} of batches: give its dataset, "
            "or DataLoader(dataset, batch_size=None)"
        )
    if isinstance(source, tuple | list) and len(source) == 2 and all(getattr(part, "ndim", 0) for part in source):
        x, y = (part.to_numpy() if hasattr(part, "to_numpy") else part for part in source)
        if len(x) != len(y):
            raise ConfigError(f"{argument}: expected as many X as y, got {len(x)} and {len(y)}")
        return zip(x, y, strict=True)
    if isinstance(source, Iterable) and not isinstance(source, Mapping | str | bytes):
        return iter(source)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Mapping | str | bytes):
        return (source[at] for at in range(len(source)))  # a torch dataset with indices
    if isinstance(source, Mapping):
        raise ConfigError(
            f"{argument}: expected samples, or a dict as in a job file ({{'kind': 'csv', 'path': ...}}), got one of "
            f"{', '.join(map(repr, source))}: give arrays as (X, y), and columns as a DataFrame"
        )
    raise ConfigError(
        f"{argument}: expected an iterable of samples, a DataFrame, a dataset, or a dict as in a job file "
        f"({{'kind': 'csv', 'path': ...}}), got {type(source).__name__}"
    )


def _encoder(value: Any) -> Callable[[Any], bytes]:
    """Return the function that encodes values of this kind. Raises TypeError if there is none."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes
    if isinstance(value, str):
        return str.encode
    if isinstance(value, Mapping | msgspec.Struct) or dataclasses.is_dataclass(value):
        return _json
    if isinstance(value, Sample) or (isinstance(value, tuple | list) and len(value) == 2):
        return _pair
    raise TypeError(f"it is {type(value).__name__}")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Return a numpy number or array, or a time, as a value that JSON can store."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a field is {type(value).__name__}")


def _pair(value: Any) -> bytes:
    return pairs.encode(*value)
