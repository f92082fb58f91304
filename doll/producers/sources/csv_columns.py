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


class Picked:
    """Which columns of a file are sent, in which order."""

    def __init__(self, path: Path, header: bytes, columns: Sequence[str], delimiter: str) -> None:
        """
        Args:
            header: the file's first line.

        Raises:
            ConfigError: it does not name the columns, or one of them twice.
        """
        self.path, self.delimiter = path, delimiter
        try:
            names = self.cells(header.decode("utf-8-sig"))
        except (UnicodeDecodeError, csv.Error) as exc:
            raise ConfigError(f"{path}: expected a line of CSV that names its columns, got {short(exc)}") from exc
        if lacking := [name for name in columns if name not in names]:
            raise ConfigError(
                f"{path}: has no column {', '.join(lacking)} (source.columns); it has "
                f"{short(', '.join(names), _SHOWN_CHARS)}"
            )
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ConfigError(f"{path}: names column {', '.join(twice)} twice: which one is meant cannot be told")
        self.count = len(names)
        self.places = [names.index(name) for name in columns]

    @long_cells()
    def cells(self, line: str) -> list[str]:
        """The cells of a line.

        Raises:
            csv.Error: it is no line of CSV.
        """
        return next(csv.reader([line], delimiter=self.delimiter, strict=True))


def records(picked: Picked, lines: Iterable[bytes], rows: Iterator[int]) -> Iterator[bytes]:
    """The lines of the columns, in order.

    A line that has not the file's columns is logged with its row, and is a record that no reader of these columns
    takes: a worker refuses it, and it is kept as a dead letter.

    Args:
        rows: the number of each line, counted over all repetitions, for the log.
    """
    out, logged = io.StringIO(), 0
    write = csv.writer(out, delimiter=picked.delimiter, lineterminator="").writerow
    for line, row in zip(lines, rows, strict=False):
        try:
            cells = picked.cells(line.decode())
            problem = "" if len(cells) == picked.count else f"expected {picked.count} cells, got {len(cells)}"
        except (UnicodeDecodeError, csv.Error) as exc:
            cells, problem = [], short(exc)
        if problem:
            if logged < _MOST_LOGGED:
                log.warning("row_unusable", file=str(picked.path), row=row, reason=problem)
            logged += 1
            # With as many cells as there are columns, it would be taken for one of their lines.
            yield line + picked.delimiter.encode() if len(cells) == len(picked.places) else line
            continue
        out.seek(0)
        out.truncate()
        write([cells[place] for place in picked.places])
        yield out.getvalue().encode()
