"""Text in pieces: each line of a file is a document, a record `{"text": "..."}` has at most so many of its tokens.

A token is a maximal run of letters, of any script, in the lower-cased text; everything else separates tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from doll.errors import ConfigError
from doll.producers.sources import lines

_LETTERS: Final = re.compile(r"[^\W\d_]+")
_OBJECTS: Final = msgspec.json.Decoder(dict[str, Any])


def tokens(text: str) -> list[str]:
    """The tokens of a text, in order. Those of `" ".join(tokens(text))` are the same."""
    return _LETTERS.findall(text.lower())


def read_lines(path: Path, *, skip: int = 0, repeat: bool = False, max_bytes: int) -> Iterator[bytes]:
    """The lines of `path` in order, without blank ones.

    Args:
        skip: leave out so many lines at the beginning, in every repetition.
        repeat: begin again at the end.
        max_bytes: as in `lines.read_file`.

    Raises:
        ConfigError: immediately when the file cannot be read, or has no line behind `skip`; later when it is damaged
            further on.
    """

    def once() -> Iterator[bytes]:
        return itertools.islice(lines.read_file(path, max_bytes=max_bytes), skip, None)

    documents = once()
    first = next(documents, None)
    if first is None:
        raise ConfigError(f"source.skip: expected fewer than the lines of {path}, got {skip}")
    again = (once() for _ in itertools.count()) if repeat else ()
    return itertools.chain((first,), documents, itertools.chain.from_iterable(again))


def records(
    documents: Iterable[bytes], fields: Sequence[str], *, tokens_per_record: int, max_bytes: int
) -> Iterator[bytes]:
    """The records of these lines, in order.

    A line that cannot be read as text, or is longer than `max_bytes`, is a record as it is: a worker refuses it, and it
    is kept as a dead letter. A line without any token gives no record.

    Args:
        fields: of the JSON object in each line, whose texts are joined; none: a line is plain text in UTF-8.
        tokens_per_record: a document with more tokens is cut into as few pieces as possible, of equal length but for
            one token.
    """
    for line in documents:
        text = _text(line, fields) if len(line) <= max_bytes else None
        if text is None:
            yield line
            continue
        document = tokens(text)
        pieces = -(-len(document) // tokens_per_record)
        for piece in range(pieces):
            part = document[piece * len(document) // pieces : (piece + 1) * len(document) // pieces]
            yield msgspec.json.encode({"text": " ".join(part)})


def _text(line: bytes, fields: Sequence[str]) -> str | None:
    """The text of a line; None where it has none in every field."""
    try:
        if not fields:
            return line.decode()
        document = _OBJECTS.decode(line)
    except (ValueError, RecursionError):
        return None
    texts = [text for field in fields if isinstance(text := document.get(field), str)]
    return "\n".join(texts) if len(texts) == len(fields) else None
