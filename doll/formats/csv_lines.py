"""CSV lines, one line in each value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from doll.errors import ConfigError, SampleError
from doll.formats.reader import FieldReader, UInt64, inner_kinds, missing
from doll.records.bounded import long_cells, short

_SHOWN_CHARS: Final = 60
_EXACT: Final = 1 << 53


class CsvReader(FieldReader):
    """A reader of cells by the names of their columns. Text is converted to the type of its field."""

    def __init__(self, record: type[msgspec.Struct], columns: Sequence[str], delimiter: str) -> None:
        """
        Raises:
            ConfigError: a field that `record` requires has no column, or two columns have one name.
        """
        super().__init__(record)
        fields = msgspec.structs.fields(record)
        if lacking := missing(record, columns):
            raise ConfigError(
                f"data.format.columns: expected {lacking} among them, which the task's {record.__name__} requires"
            )
        if len(set(columns)) < len(columns):
            raise ConfigError("data.format.columns: expected different names")
        self._count = len(columns)
        names = {field.encode_name for field in fields}
        self._columns = [(at, name) for at, name in enumerate(columns) if name in names]
        self._delimiter = delimiter
        self._names = columns
        self._integers = [field.encode_name for field in fields if {int, UInt64} & set(inner_kinds(field.type))]

    def read_one(self, value: bytes) -> Any:
        rows = self._rows([value])
        if len(rows) != 1 or len(rows[0]) != self._count:
            count = len(rows[0]) if rows else 0
            raise SampleError(f"expected a line of {self._count} cells (data.format.columns), got {count}")
        fields = self._fields(rows[0])
        try:
            return msgspec.convert(fields, self.record, strict=False)
        except msgspec.ValidationError as exc:
            name = str(exc).rpartition("`$.")[2].rstrip("`")
            if (cell := fields.get(name)) is None:
                raise
            raise SampleError(f"{exc}, in the cell {short(cell, _SHOWN_CHARS)!r}") from None

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        rows = self._rows(values)
        # A quote that is not closed would also include the following lines.
        if len(rows) != len(values) or set(map(len, rows)) != {self._count}:
            raise SampleError("a line has other cells")
        return msgspec.convert(list(map(self._fields, rows)), self._list, strict=False)

    @long_cells()
    def _rows(self, values: Sequence[bytes]) -> list[list[str]]:
        try:
            lines = [value.decode() for value in values]
        except UnicodeDecodeError as exc:
            (cells, *_) = [*csv.reader([values[0].decode(errors="replace")], delimiter=self._delimiter), []]
            bad = [name for name, cell in zip(self._names, cells, strict=False) if "\ufffd" in cell]
            raise SampleError(f"{bad[0] if bad else 'the line'}: expected UTF-8, got {exc}") from None
        try:
            return list(csv.reader(lines, delimiter=self._delimiter, strict=True))
        except csv.Error as exc:
            raise SampleError(f"not a line of CSV: {exc}") from exc

    def _fields(self, row: list[str]) -> dict[str, str]:
        fields = {name: cell for at, name in self._columns if (cell := row[at])}
        for name in self._integers:
            cell = fields.get(name, "0")
            if not cell.isdecimal() and _is_inexact(cell):
                raise SampleError(
                    f"{name}: expected an integer, got {short(cell, _SHOWN_CHARS)}, which may have been another"
                )
        return fields


def _is_inexact(cell: str) -> bool:
    """Return whether the cell is a float so large that several integers become the same float."""
    if cell[1:].isdecimal():
        return False
    try:
        return abs(float(cell)) >= _EXACT
    except ValueError:
        return False
