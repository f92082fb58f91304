"""CSV lines with some columns of a file; the header of the file names the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.producers.sources import check_names
from doll.records.bounded import long_cells, short
from doll.telemetry import get_logger

log = get_logger(__name__)

_MOST_LOGGED: Final = 20  # maximum number of rows that are logged for each stream


class CsvColumns:
    """The columns of a file that are sent, in their order."""

    def __init__(self, path: Path, header: bytes, columns: Sequence[str], delimiter: str) -> None:
        """
        Raises:
            ConfigError: the header does not name all columns, or names a column twice.
        """
        self._path, self._delimiter = path, delimiter
        try:
            names = self._cells(header.decode("utf-8-sig"))
        except (UnicodeDecodeError, csv.Error) as exc:
            raise ConfigError(f"{path}: expected a line of CSV that names its columns, got {short(exc)}") from exc
        check_names(str(path), names, columns)
        self._count = len(names)
        self._places = [names.index(name) for name in columns]

    def records(self, lines: Iterable[bytes], rows: Iterator[int]) -> Iterator[bytes]:
        """Yield the lines, reduced to the columns, in order.

        A line that does not have the file's columns is logged with its row. It becomes a record that no reader of these
        columns accepts: a worker refuses it and stores it as a dead letter.

        Args:
            rows: number of each line, counted over all repetitions, for the log.
        """
        logged = 0
        for line, row in zip(lines, rows, strict=False):
            try:
                cells = self._cells(line.decode())
                problem = "" if len(cells) == self._count else f"expected {self._count} cells, got {len(cells)}"
            except (UnicodeDecodeError, csv.Error) as exc:
                cells, problem = [], short(exc)
            if not problem:
                out = io.StringIO()
                write = csv.writer(out, delimiter=self._delimiter, lineterminator="").writerow
                write([cells[place] for place in self._places])
                yield out.getvalue().encode()
                continue
            if logged < _MOST_LOGGED:
                log.warning("row_unusable", file=str(self._path), row=row, reason=problem)
            logged += 1
            # If it had as many cells as there are columns, a reader would accept it as a valid line.
            yield line + self._delimiter.encode() if len(cells) == len(self._places) else line

    @long_cells()
    def _cells(self, line: str) -> list[str]:
        return next(csv.reader([line], delimiter=self._delimiter, strict=True))
