"""A table as a CSV file: new rows are appended, and the file is replaced if earlier rows have changed."""

from __future__ import annotations

import contextlib
import csv
import math
from pathlib import Path
from typing import IO

from doll.monitor.state.history import MetricTable
from doll.process.files import replacing

_INTEGER_COLUMNS = frozenset({"term", "version", "n_samples", "samples_total", "batches", "records", "void"})


class CsvFile:
    """Writes `table` to `path`. The first `sync` replaces the file of an earlier process."""

    def __init__(self, path: Path, table: MetricTable) -> None:
        self.path = path
        self._table = table
        self._written = -1  # -1: before the first sync

    def sync(self, *, changed: bool = False) -> None:
        """Write the new rows.

        Args:
            changed: whether earlier rows or the columns differ from the file.

        Raises:
            OSError: the folder cannot be written.
        """
        if changed or self._written < 0:
            with replacing(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(self._table.names)
                self._write(file, 0)
        elif len(self._table) > self._written:
            with self.path.open("a", encoding="utf-8") as file:
                self._write(file, self._written)
        self._written = len(self._table)

    def _write(self, file: IO[str], start: int) -> None:
        """Write the rows from `start` on, one at a time, because all rows of a long run would take 100 MB as text."""
        rows = map(self._table.row, range(start, len(self._table)))
        cells = ([_cell(name, row[name]) for name in self._table.names] for row in rows)
        csv.writer(file, lineterminator="\n").writerows(cells)


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of a file that `CsvFile` wrote, without empty cells. Invalid lines are skipped, such as the
    incomplete last line of a killed process.

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


def rows_if_any(path: Path) -> list[dict[str, float]]:
    """Return the rows as `read_rows`; no rows if the file cannot be read."""
    try:
        return read_rows(path)
    except OSError:
        return []


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return ""
    if name in _INTEGER_COLUMNS:
        return str(int(value))
    return f"{value:.3f}" if name == "time_s" else f"{value:.6g}"
