"""External values, bounded in length and depth, with one error for whatever is wrong with them.

Python's own readers say so in five ways: ValueError, UnicodeDecodeError, RecursionError, MemoryError, OverflowError. A
service that catches four of them stops at the fifth.
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
    """An external value is not as expected; the message is one short line."""


def json_value(text: str | bytes, *, max_chars: int = MAX_JSON_CHARS) -> Any:
    """The value of a JSON text, at most `MAX_DEPTH` levels deep; raises MalformedError if it is too long or too deep,
    or not JSON."""
    if len(text) > max_chars:
        raise MalformedError(f"expected JSON of at most {max_chars} characters, got {len(text)}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError, MemoryError, OverflowError) as exc:
        raise MalformedError(f"not JSON: {short(exc)}") from exc
    check_size(value)
    return value


def json_object(text: str | bytes, *, max_chars: int = MAX_JSON_CHARS) -> dict[str, Any]:
    """The object in a text, with the limits of `json_value`; MalformedError also if the text holds another value."""
    value = json_value(text, max_chars=max_chars)
    if not isinstance(value, dict):
        raise MalformedError(f"expected a JSON object, got {type(value).__name__}")
    return value


def check_size(value: Any, *, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Refuse a tree of lists and mappings that is too large or too deep with all its references followed; raises
    MalformedError if it has more than `max_values` values or `max_depth` levels."""
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
    """The UTF-8 text of a file that is not larger than expected; no more than that is read. Raises OSError if it cannot
    be read, and MalformedError if it is larger, or not UTF-8."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise MalformedError(f"expected at most {max_bytes} bytes, got more")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise MalformedError(f"expected UTF-8, got byte 0x{data[exc.start]:02x} at {exc.start}") from exc


def short(value: object, limit: int = 200) -> str:
    """A value for a message: one line, cut off, without control characters and without credentials in URLs."""
    text = redacted(" ".join(str(value).split()))
    text = "".join(char if char.isprintable() else "?" for char in text[: limit + 1])
    return text if len(text) <= limit else f"{text[:limit]}..."


def printable(text: str) -> str:
    """`text` with control characters escaped, and what else is not printed: it comes from outside, and could steer a
    terminal, or turn the line around (U+202E)."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@contextmanager
def long_cells() -> Iterator[None]:
    """Read cells of CSV of any length within it, for lines that are bounded: the library's own limit is 128 KB, and one
    for the whole process."""
    before = csv.field_size_limit(_MOST_CELL_CHARS)
    try:
        yield
    finally:
        csv.field_size_limit(before)
