"""Rows of Arrow tables as JSON objects, distributed over the streams of a job: row i goes to stream i mod N."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa

from doll.errors import ConfigError
from doll.producers.sources import check_names
from doll.records.bounded import short
from doll.telemetry import get_logger

log = get_logger(__name__)

BLOCK_ROWS: Final = 1024
_MOST_LOGGED: Final = 20  # maximum number of rows that are logged for each stream
_SHOWN_CHARS: Final = 200
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


class TableRows(Protocol):
    """Rows that can be read from any row on."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def blocks(self, first: int) -> Iterator[tuple[int, str, int, Any]]:
        """Yield consecutive tables; the first one contains row `first`.

        Returns:
            For each table: the number of its first row, its file, the number of its first row in this file, and the
            table.

        Raises:
            ConfigError: a file is damaged.
        """


def records(rows: TableRows, first: int, step: int, repeat: bool, max_bytes: int) -> Iterator[bytes]:
    """Yield every `step`-th row from `first` on as a JSON object. Rows are counted over all repetitions.

    A row that cannot be read is logged, and its record contains the reason: a worker refuses it and stores a dead
    letter.

    Args:
        repeat: whether to begin again at the end.
        max_bytes: maximum size of a record. A larger record is cut to `max_bytes` + 1 bytes, so that a check of its
            length fails.

    Raises:
        ConfigError: a file is damaged, or has fewer rows than before.
    """
    place, reached, logged = first, -1, 0
    while repeat or place < rows.count:
        if place == reached:
            raise ConfigError(f"source.path: expected {rows.count} rows, got fewer: was a file changed meanwhile?")
        begin, reached = place - place % rows.count, place  # begin of this pass
        for at, file, at_in_file, table in rows.blocks(place - begin):
            own = range(place - begin - at, len(table), step)
            if not own:
                continue
            for index, value in zip(own, values_of(without_views(table).take(list(own))), strict=True):
                if isinstance(value, Unreadable):
                    row = at_in_file + index
                    reason = f"{file}, row {row}, column {value.column}: {value.reason}"
                    if logged < _MOST_LOGGED:
                        log.warning("row_unusable", file=file, row=row, column=value.column, reason=value.reason)
                    logged += 1
                    yield reason.encode()
                else:
                    yield value[: max_bytes + 1]
            place += step * len(own)


def without_views(table: Any) -> Any:
    """Return the table with plain texts and bytes instead of views, because Arrow cannot convert views to rows."""
    for at, field in enumerate(table.schema):
        if "_view" in str(field.type):
            plain = table.column(at).cast(_plain(field.type), safe=False)
            table = table.set_column(at, field.with_type(plain.type), plain)
    return table


class Unreadable:
    """A row without a form in JSON."""

    def __init__(self, column: str, reason: str) -> None:
        self.column, self.reason = column, reason


def values_of(table: Any) -> Sequence[bytes | Unreadable]:
    """Return the rows as JSON objects, or why a row cannot be one."""
    names = table.column_names
    try:
        return [_encode(dict(zip(names, row, strict=True))) for row in zip(*map(_column, table.columns), strict=True)]
    except Exception:  # text that is not UTF-8, or a date that Python cannot represent: search for its row
        return [_value(table.slice(row, 1)) for row in range(len(table))]


def _value(table: Any) -> bytes | Unreadable:
    cells = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            (cells[name],) = _column(column)
            _encode(cells[name])
        except Exception as exc:
            return Unreadable(name, short(f"{type(exc).__name__}: {exc}", _SHOWN_CHARS))
    return _encode(cells)


def _column(column: Any) -> list[Any]:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    plain = _plain(array.type)
    values: list[Any] = (array if plain == array.type else array.cast(plain, safe=False)).to_pylist()
    return values


def _plain(kind: Any) -> Any:
    """Return the type to which values are converted for JSON: times in microseconds, floats of 32 or 64 bits.

    Raises:
        TypeError: there is no such type.
    """
    types = pa.types
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_float16(kind):
        return pa.float32()
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if isinstance(kind, pa.BaseExtensionType) or types.is_union(kind) or types.is_interval(kind):
        raise TypeError(f"values of Arrow's type {kind} have no form in JSON")
    return kind


def check_columns(origin: str, schema: Any, columns: Sequence[str]) -> None:
    """Check that the columns exist, and can be written as JSON.

    Args:
        columns: names of the columns; empty: all columns of the schema.

    Raises:
        ConfigError: a column does not exist, or cannot be written as JSON.
    """
    check_names(origin, schema.names, columns)
    for name in columns or schema.names:
        kind = schema.field(name).type
        try:
            _plain(kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind)
        except TypeError as exc:
            raise ConfigError(f"{origin}: column {name}: {exc}: leave it out by source.columns") from None
