"""Lines of CSV, one in each value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

import msgspec

from doll.errors import ConfigError, SampleError
from doll.formats.reader import FieldReader


class CsvReader(FieldReader):
    """Cells by the names of their columns. Text becomes what the type of its field says."""

    def __init__(self, record: type[msgspec.Struct], columns: Sequence[str], delimiter: str) -> None:
        """
        Raises:
            ConfigError: a field that `record` requires has no column, or two columns have one name.
        """
        super().__init__(record)
        fields = msgspec.structs.fields(record)
        if lacking := [field.encode_name for field in fields if field.required and field.encode_name not in columns]:
            raise ConfigError(
                f"data.format.columns: expected {', '.join(lacking)} among them, which the task's {record.__name__} "
                "requires"
            )
        if len(set(columns)) < len(columns):
            raise ConfigError("data.format.columns: expected different names")
        self._count = len(columns)
        names = {field.encode_name for field in fields}
        self._columns = [(at, name) for at, name in enumerate(columns) if name in names]
        self._delimiter = delimiter
        self._list = list[record]  # type: ignore[valid-type]

    def read_one(self, value: bytes) -> Any:
        rows = self._rows([value])
        if len(rows) != 1 or len(rows[0]) != self._count:
            count = len(rows[0]) if rows else 0
            raise SampleError(f"expected a line of {self._count} cells (data.format.columns), got {count}")
        return msgspec.convert(self._fields(rows[0]), self.record, strict=False)

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        rows = self._rows(values)
        # A quote that is not closed takes the lines behind it as well.
        if len(rows) != len(values) or set(map(len, rows)) != {self._count}:
            raise SampleError("a line has other cells")
        return msgspec.convert(list(map(self._fields, rows)), self._list, strict=False)

    def _rows(self, values: Sequence[bytes]) -> list[list[str]]:
        lines = [value.decode() for value in values]
        try:
            return list(csv.reader(lines, delimiter=self._delimiter, strict=True))
        except csv.Error as exc:
            raise SampleError(f"not a line of CSV: {exc}") from exc

    def _fields(self, row: list[str]) -> dict[str, str]:
        return {name: cell for at, name in self._columns if (cell := row[at])}
