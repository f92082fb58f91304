"""Lines of CSV with some of a file's columns, which are named by the file's header."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.records.bounded import long_cells, short
from doll.telemetry import get_logger

log = get_logger(__name__)

_MOST_LOGGED: Final = 20  # rows of each stream
_SHOWN_CHARS: Final = 200


class CsvColumns:
    """The columns of a file that are sent, in their order."""

    def __init__(self, path: Path, header: bytes, columns: Sequence[str], delimiter: str) -> None:
        """
        Args:
            header: the file's first line.

        Raises:
            ConfigError: it does not name the columns, or one of them twice.
        """
        self._path, self._delimiter = path, delimiter
        try:
            names = self._cells(header.decode("utf-8-sig"))
        except (UnicodeDecodeError, csv.Error) as exc:
            raise ConfigError(f"{path}: expected a line of CSV that names its columns, got {short(exc)}") from exc
        if lacking := [name for name in columns if name not in names]:
            raise ConfigError(
                f"{path}: has no column {', '.join(lacking)} (source.columns); it has "
                f"{short(', '.join(names), _SHOWN_CHARS)}"
            )
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ConfigError(f"{path}: names column {', '.join(twice)} twice: which one is meant cannot be told")
        self._count = len(names)
        self._places = [names.index(name) for name in columns]

    def records(self, lines: Iterable[bytes], rows: Iterator[int]) -> Iterator[bytes]:
        """The lines of the columns, in order.

        A line that has not the file's columns is logged with its row, and is a record that no reader of these columns
        takes: a worker refuses it, and it is kept as a dead letter.

        Args:
            rows: the number of each line, counted over all repetitions, for the log.
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
            # With as many cells as there are columns, it would be taken for one of their lines.
            yield line + self._delimiter.encode() if len(cells) == len(self._places) else line

    @long_cells()
    def _cells(self, line: str) -> list[str]:
        return next(csv.reader([line], delimiter=self._delimiter, strict=True))
