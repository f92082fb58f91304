"""Tables and lines of external files. Damage raises a `ConfigError` with file, line and expected content.

Files are plain or .gz. The sizes of lines, files and numbers are limited, because a few compressed kilobytes can
contain a line that fills the memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.records.bounded import short

MAX_LINE_CHARS: Final = 16_000_000
MAX_CHARS: Final = 4_000_000_000
# No recording exceeds these limits, and sums and products within them stay finite.
MAX_NUMBER: Final = 1e15


def text_lines(path: Path) -> Iterator[str]:
    """Return the lines of a text file with their line ends, decompressed if its name ends in .gz. Raises ConfigError if
    the file is damaged, not UTF-8, or too large for a recording; the lines before the damage are returned first."""
    total = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE_CHARS + 1):
                total += len(line)
                if len(line) > MAX_LINE_CHARS or total > MAX_CHARS:
                    most = f"{MAX_LINE_CHARS} characters in a line and {MAX_CHARS} in all"
                    raise ConfigError(f"{path}: expected at most {most}, got more")
                yield line
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected text in UTF-8, got byte 0x{error.object[error.start]:02x} ({error.reason})"
        ) from error
    except EOFError as error:
        raise ConfigError(f"{path}: expected a whole .gz file, got one that is cut off") from error
    except (OSError, zlib.error) as error:
        what = "a whole .gz file" if path.suffix == ".gz" else "a readable file"
        came = getattr(error, "strerror", None) or short(error)
        raise ConfigError(f"{path}: expected {what}, got: {came}") from error


def _open(path: Path) -> io.TextIOWrapper:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Return line number and cells of each line of a CSV file whose header has at least `columns`. Raises ConfigError
    if the file cannot be read, or a column is missing."""
    reader = csv.DictReader(text_lines(path), restval="")
    try:
        header = reader.fieldnames
        if header is None:
            raise ConfigError(f"{path}: expected a header with the columns {', '.join(columns)}, got an empty file")
        missing = [name for name in columns if name not in header]
        if missing:
            raise ConfigError(f"{path}: expected the columns {', '.join(columns)}; {', '.join(missing)} missing")
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num}: expected CSV, got: {short(error)}") from error


def number(row: Mapping[str, str], column: str, where: str) -> float:
    """Return the finite number in `column`. Raises ConfigError if it is not a number, or exceeds `MAX_NUMBER`."""
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    if not abs(value) <= MAX_NUMBER:
        raise ConfigError(f"{where}: expected a number in {column}, got {short(row[column], 60)!r}")
    return value
