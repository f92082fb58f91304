"""Tasks that get the fields of records as numpy columns. Records are decoded in batches, with msgspec.

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
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Union, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from doll.config.format import FormatSection
from doll.errors import BadRecordsError, ConfigError, SampleError, SkipRecord
from doll.formats import open_reader
from doll.formats.reader import FieldReader, JsonReader, is_uint64
from doll.task import trees
from doll.task.base import Sample, Samples, Task, x_of
from doll.task.records import Record, Records
from doll.task.trees import objects, parts_of, tree_of

_DTYPES: Final[dict[Any, Any]] = {bool: np.bool_, int: np.int64, float: np.float64}
_json_reader: Callable[[type[msgspec.Struct]], FieldReader] = cache(JsonReader)


class Columns(dict[str, npt.NDArray[Any]]):
    """The columns of a batch: one array for each field of `FieldsTask.record`, by name.

    Attributes:
        records: the records, with keys, headers and timestamps if the task sets `whole_records`.
        missing: for each field of `FieldsTask.missing`, the booleans, shape (n,), that mark the values filled in.
    """

    def __init__(
        self,
        columns: dict[str, npt.NDArray[Any]],
        records: Records | None = None,
        missing: Mapping[str, npt.NDArray[np.bool_]] = types.MappingProxyType({}),
    ) -> None:
        super().__init__(columns)
        self.records = Records([]) if records is None else records
        self.missing = missing

    def feedback(self, label: str) -> dict[str, npt.NDArray[Any]]:
        """Return the y that the functions of `doll.losses` take, for a task whose record is a `doll.JoinedRecord`.

        Args:
            label: name of the field that holds the label, 0 or 1.

        Returns:
            Arrays of shape (n,): `label`, `age_s` and `replaced_label` (0 in first records), float32, and
            `is_correction`.

        Raises:
            BadRecordsError: some labels are neither 0 nor 1.
            SampleError: the only label is neither 0 nor 1.
        """
        labels = self[label].astype(np.float32)
        first = np.array([0 if value is None else value for value in self["doll_replaced_label"]], np.float32)
        bad = ~(np.isin(labels, (0, 1)) & np.isin(first, (0, 1)))
        if bad.any():
            if len(bad) > 1:
                raise BadRecordsError(np.flatnonzero(bad))
            raise SampleError(f"{label}: expected a label of 0 or 1, got {labels[0]:g}, first label {first[0]:g}")
        return {
            "label": labels,
            "age_s": self["doll_label_age_s"].astype(np.float32),
            "is_correction": self["doll_is_correction"],
            "replaced_label": first,
        }


class FieldsTask(Task):
    """A task whose records have fields, in the format that `data.format` sets (default: JSON objects).
    Subclass it and write `record`, `samples` and `build_model`.

    A record is dead-lettered if it lacks a field that has no default, or has a field with a value of another type.
    Fields that `record` does not name are ignored.

    Attributes:
        record: a `msgspec.Struct` with the names and types of the fields that the task uses.
        reader: the decoder of values; set when the task is loaded for a job with `data.format`.
        targets: fields that are used only for the target. A record for a prediction may omit them.
        missing: for some fields, the value that replaces null: imputation with a constant. The field must allow null
            (`float | None = None` also allows that the field is absent). The type of the column is that of the value.
        categories: for some fields, the known categories. The column has the number of the category, 1 for the first
            one, int64, and 0 for null and for all other values: for a category that was never seen.
    """

    record: ClassVar[type[msgspec.Struct]]
    reader: FieldReader | None = None
    targets: ClassVar[tuple[str, ...]] = ()
    missing: Mapping[str, Any] = types.MappingProxyType({})
    categories: Mapping[str, Sequence[Any]] = types.MappingProxyType({})

    def samples(self, columns: Columns) -> Samples | tuple[Any, Any]:
        """Return the samples of n records, n >= 1. Row i must depend only on record i.

        Args:
            columns: one array for each field of `record`. Shape (n,): float64 for `float` and for `float | None` (None
                becomes NaN), int64 for `int`, uint64 for `doll.UInt64`, booleans for `bool`. For lists of these types:
                shape (n, length), or an array of n list objects if the lengths differ. All other types: objects.

        Returns:
            Arrays: x of shape (n, *input_shape) and y of shape (n, ...), or dicts, tuples and lists of such arrays.
            `Samples` if some records are skipped or have several samples, or if samples have weights or groups. A task
            that defines `collate` may return arrays of objects: n lists or arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} must define samples(columns)")

    def use_format(self, section: FormatSection, *, load: Callable[[str], Any], path: Callable[[Path], Path]) -> None:
        self.reader = open_reader(section, self.record, load=load, path=path)

    @property
    def decodes_records(self) -> bool:
        return self.whole_records

    def decode(self, record: bytes) -> Sample | list[Sample]:
        return self._one(Records([record]))

    def decode_record(self, record: Record) -> Sample | list[Sample]:
        return self._one(Records.from_record(record))

    def decode_many(self, values: Sequence[bytes]) -> Samples | tuple[Any, Any]:
        return self._arrays(self._reader.read(values), values)

    def decode_features(self, record: bytes) -> Any:
        """Decode the features of a record, a JSON object of the fields, even if the stream has another format."""
        if not self.targets:
            return super().decode_features(record)
        event = _features_reader(self.record, self.targets).read_one(record)
        return x_of(self._sample(event, Records([record])))

    @property
    def _reader(self) -> FieldReader:
        return _json_reader(self.record) if self.reader is None else self.reader

    def _one(self, records: Records) -> Sample | list[Sample]:
        try:
            event = self._reader.read_one(records[0])
        except msgspec.ValidationError as exc:
            if "Expected `float`, got `null`" not in str(exc):
                raise
            raise SampleError(f"{exc}: if it may be missing, declare it `float | None`, which gives NaN") from None
        return self._sample(event, records)

    def _sample(self, event: msgspec.Struct, records: Records) -> Sample | list[Sample]:
        made = self._arrays([event], records)
        x, y = made[:2]
        if not all(
            np.isfinite(array).all() for array in map(np.asarray, trees.arrays_of(made[:2])) if array.dtype.kind == "f"
        ):
            for name, get, dtype in _fields(self.record):
                if dtype is np.float64 and (value := get(event)) is not None and not np.isfinite(value).all():
                    raise SampleError(f"{name} is NaN or infinite: expected a number, or nothing in a `float | None`")
        if not isinstance(made, Samples):
            return Sample(*(trees.taken_apart(tree, 1)[0] for tree in made))
        for reason, mask in made.skipped.items():
            if mask[0]:
                raise SkipRecord(reason)
        count = 1 if made.counts is None else int(made.counts.sum())
        weights = [1.0] * count if made.weight is None else np.asarray(made.weight).tolist()
        groups = [None] * count if made.group is None else np.asarray(made.group).tolist()
        samples = list(map(Sample, trees.taken_apart(x, count), trees.taken_apart(y, count), weights, groups))
        return samples[0] if made.counts is None else samples

    def _arrays(self, events: list[msgspec.Struct], records: Sequence[bytes]) -> Samples | tuple[Any, Any]:
        made = self.samples(self._columns(events, records if isinstance(records, Records) else Records(records)))
        x, y = (tree_of(structure, list(map(np.asarray, leaves))) for leaves, structure in map(parts_of, made[:2]))
        return made._replace(x=x, y=y) if isinstance(made, Samples) else (x, y)

    def _columns(self, events: list[msgspec.Struct], records: Records) -> Columns:
        columns: dict[str, npt.NDArray[Any]] = {}
        missing: dict[str, npt.NDArray[np.bool_]] = {}
        numbers_of = self._numbers_of
        for name, get, dtype in _fields(self.record):
            values = list(map(get, events))
            if name in self.missing:
                fill = self.missing[name]
                missing[name] = np.fromiter((value is None for value in values), np.bool_, len(values))
                values = [fill if value is None else value for value in values]
                dtype = _DTYPES.get(type(fill), np.object_) if dtype is np.object_ else dtype
            if name in self.categories:
                numbers = numbers_of[name]
                values, dtype = [numbers.get(value, 0) for value in values], np.int64
            columns[name] = _column(name, values, dtype)
        return Columns(columns, records, missing)

    @cached_property
    def _numbers_of(self) -> dict[str, dict[Any, int]]:
        """The numbers of the known categories, by field."""
        if unknown := {*self.missing, *self.categories} - {field.name for field in msgspec.structs.fields(self.record)}:
            raise ConfigError(
                f"{self.record.__name__}: expected fields in missing and categories, got {sorted(unknown)}"
            )
        return {name: {value: at for at, value in enumerate(known, 1)} for name, known in self.categories.items()}


class JsonTask(FieldsTask):
    """A `FieldsTask` whose records always are JSON objects."""

    def use_format(self, section: FormatSection, *, load: Callable[[str], Any], path: Callable[[Path], Path]) -> None:
        if section.kind != "json":
            Task.use_format(self, section, load=load, path=path)


class JoinedRecord(msgspec.Struct, kw_only=True):
    """The fields that a joiner adds to the features and labels. Subclass it for `FieldsTask.record`.

    A record without them counts as the first record of its pair, with a label of age 0.

    Attributes:
        doll_label_age_s: seconds from the features to the label, or to the decision if there is no label.
        doll_is_correction: whether the record corrects, retracts or confirms an earlier record of the same pair.
        doll_replaced_label: the label of the record that this one corrects; None in a first record.
    """

    doll_label_age_s: float = 0.0
    doll_is_correction: bool = False
    doll_replaced_label: Any = None


@cache
def _features_reader(record: type[msgspec.Struct], targets: tuple[str, ...]) -> FieldReader:
    """Return a reader of JSON objects that may lack the fields `targets`; it fills them with values of their types."""
    fields = msgspec.structs.fields(record)
    if unknown := set(targets) - {field.name for field in fields}:
        raise ConfigError(f"{record.__name__}: expected targets among its fields, got {sorted(unknown)}")
    optional = [
        (field.name, field.type, _stand_in(field.type))
        if field.name in targets
        else (field.name, field.type)
        if field.required
        else (field.name, field.type, _default(field))
        for field in fields
    ]
    names = {field.name: field.encode_name for field in fields}
    return JsonReader(msgspec.defstruct(record.__name__, optional, kw_only=True, rename=names))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field(default=field.default)


def _stand_in(kind: Any) -> Any:
    kind = _without_bounds(kind)
    origin = get_origin(kind) or kind
    return origin() if origin in (bool, int, float, str, list, dict, tuple) else None


@cache
def _fields(record: type[msgspec.Struct]) -> list[tuple[str, Any, Any]]:
    """Return the name, the getter and the numpy type of each field."""
    return [(field.name, attrgetter(field.name), _dtype(field.type)) for field in msgspec.structs.fields(record)]


def _dtype(kind: Any) -> Any:
    """Return the numpy type of the column for a field of this type; object if the field is not a number."""
    if is_uint64(kind):
        return np.uint64
    kind = _without_bounds(kind)
    if get_origin(kind) is list:
        return _dtype(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [_without_bounds(option) for option in get_args(kind) if option is not type(None)]
        return np.float64 if kinds == [float] else np.object_
    return _DTYPES.get(kind, np.object_)


def _without_bounds(kind: Any) -> Any:
    """Return the type without its constraints: `float` for `Annotated[float, msgspec.Meta(ge=0)]`."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _column(name: str, values: list[Any], dtype: Any) -> npt.NDArray[Any]:
    """Return the column of a field.

    Raises:
        BadRecordsError: some values are out of the range of their type.
        SampleError: the only value is out of the range of its type.
    """
    if dtype is np.object_:
        return objects(values)
    try:
        return np.array(values, dtype)
    except (ValueError, OverflowError):  # lists of different lengths, or a number out of the range of the type
        bad = [at for at, value in enumerate(values) if not _holds(dtype, value)]
    if not bad:
        return objects(values)
    if len(values) > 1:
        raise BadRecordsError(bad)
    limits = np.iinfo(dtype)
    advice = "" if dtype is np.uint64 else f": `{name}: doll.UInt64` takes 0 to {np.iinfo(np.uint64).max}"
    raise SampleError(f"{name}: expected an integer from {limits.min} to {limits.max}, got {values[0]!s:.100}{advice}")


def _holds(dtype: Any, value: Any) -> bool:
    try:
        np.array(value, dtype)
    except (OverflowError, ValueError) as exc:
        return isinstance(exc, ValueError)
    return True
