"""A table as a CSV file: new rows are appended, and the file is replaced when earlier rows have changed."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from doll.monitor.state.history import Table
from doll.process.files import replacing

_ROWS = 1_000  # written at a time
_INTEGER_COLUMNS = frozenset({"term", "version", "n_samples", "samples_total", "batches", "records", "void"})


class CsvFile:
    """`table` at `path`. The first `sync` replaces a file of an earlier process."""

    def __init__(self, path: Path, table: Table) -> None:
        self.path = path
        self._table = table
        self._written = -1  # -1: before the first sync

    def sync(self, *, changed: bool = False) -> None:
        """Write what is new. `changed`: earlier rows or the columns differ from what was written.

        Raises:
            OSError: the folder cannot be written.
        """
        if changed or self._written < 0:
            with replacing(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
                file.write(_text([self._table.names]))
                self._write(file, 0)
        elif len(self._table) > self._written:
            with self.path.open("a", encoding="utf-8") as file:
                self._write(file, self._written)
        self._written = len(self._table)

    def _write(self, file: IO[str], start: int) -> None:
        """Write the rows from `start` on, in parts: as text, all rows of a long run would take 100 MB."""
        names = self._table.names
        for lo in range(start, len(self._table), _ROWS):
            rows = (self._table.row(index) for index in range(lo, min(lo + _ROWS, len(self._table))))
            file.write(_text([[_cell(name, row[name]) for name in names] for row in rows]))


def read_rows(path: Path) -> list[dict[str, float]]:
    """The rows of a file that `CsvFile` wrote, without empty cells. Lines that are no rows are skipped, such as the
    incomplete last line of a process that was killed.

    Raises:
        OSError: the file cannot be read.
    """
    rows = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file, contextlib.suppress(csv.Error):
        for row in csv.DictReader(file):
            try:
                rows.append({name: float(cell) for name, cell in row.items() if cell})
            except (TypeError, ValueError):
                continue
    return rows


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return ""
    if name in _INTEGER_COLUMNS:
        return str(int(value))
    return f"{value:.3f}" if name == "time_s" else f"{value:.6g}"


def _text(rows: Sequence[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
