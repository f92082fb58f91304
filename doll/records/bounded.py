"""Readers of external values, with limits of length and depth. Every failure raises the same error, `MalformedError`.

Python's own readers raise five different errors: ValueError, UnicodeDecodeError, RecursionError, MemoryError and
OverflowError. A service that misses one of them ends at a bad value.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from doll.redaction import redacted

MAX_JSON_CHARS: Final = 16_000_000
MAX_VALUES: Final = 1_000_000
MAX_DEPTH: Final = 40
_MOST_CELL_CHARS: Final = 1_000_000_000


class MalformedError(ValueError):
    """An external value does not have the expected form. The message is one short line."""


def json_value(text: str | bytes, *, max_chars: int = MAX_JSON_CHARS) -> Any:
    """Return the value of a JSON text. Raise MalformedError if the text is longer than `max_chars`, has more than
    `MAX_DEPTH` levels, or is not JSON."""
    if len(text) > max_chars:
        raise MalformedError(f"expected JSON of at most {max_chars} characters, got {len(text)}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError, MemoryError, OverflowError) as exc:
        raise MalformedError(f"not JSON: {short(exc)}") from exc
    check_size(value)
    return value


def json_object(text: str | bytes, *, max_chars: int = MAX_JSON_CHARS) -> dict[str, Any]:
    """Return the object of a JSON text, like `json_value`. Also raise MalformedError if the value is not an object."""
    value = json_value(text, max_chars=max_chars)
    if not isinstance(value, dict):
        raise MalformedError(f"expected a JSON object, got {type(value).__name__}")
    return value


def check_size(value: Any, *, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Raise MalformedError if a tree of lists and mappings has more than `max_values` values or more than `max_depth`
    levels. A value that is referenced several times counts several times."""
    remaining = max_values
    level = [value]
    for _ in range(max_depth):
        level = [inner for value in level if isinstance(value, Mapping | list) for inner in _inside(value)]
        if not level:
            return
        remaining -= len(level)
        if remaining < 0:
            raise MalformedError(f"expected at most {max_values} values")
    raise MalformedError(f"expected at most {max_depth} levels, got more")


def _inside(value: Mapping[Any, Any] | list[Any]) -> list[Any]:
    return value if isinstance(value, list) else [*value.keys(), *value.values()]


def read_text(path: Path, *, max_bytes: int) -> str:
    """Return the UTF-8 text of a file of at most `max_bytes` bytes; do not read beyond this limit. Raise OSError if the
    file cannot be read, and MalformedError if it is larger or not UTF-8."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise MalformedError(f"expected at most {max_bytes} bytes, got more")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise MalformedError(f"expected UTF-8, got byte 0x{data[exc.start]:02x} at {exc.start}") from exc


def short(value: object, limit: int = 200) -> str:
    """Return a value as text for a message: one line of at most `limit` characters, without control characters and
    without the credentials in URLs."""
    text = redacted(" ".join(str(value).split()))
    text = "".join(char if char.isprintable() else "?" for char in text[: limit + 1])
    return text if len(text) <= limit else f"{text[:limit]}..."


def printable(text: str, keep: str = "") -> str:
    """Return `text` with all unprintable characters escaped, except those in `keep`. Otherwise external text could send
    control characters to a terminal, or reverse the order of a line (U+202E)."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def long_cells() -> Iterator[None]:
    """Allow CSV cells of any length inside the context, for input whose lines have a limit already. The default limit
    of the csv library is 128 KB, and it is a setting of the whole process."""
    before = csv.field_size_limit(_MOST_CELL_CHARS)
    try:
        yield
    finally:
        csv.field_size_limit(before)
