"""Readers that return the lines of files (plain or .gz) and of standard input as records, without their line ends."""

from __future__ import annotations

import gzip
import itertools
import os
import select
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from doll.errors import ConfigError

_CHUNK_BYTES = 65_536
_LONGEST_BYTES = 1 << 24


def read_file(
    path: Path, *, header: bool = False, repeat: bool = False, skip: int = 0, max_bytes: int = _LONGEST_BYTES
) -> Iterator[bytes]:
    """Return the lines of `path` in order, without blank lines. Raise ConfigError if the file cannot be read or has no
    line. If a later part is damaged, the iterator raises it there.

    Args:
        header: True: leave out the first line.
        repeat: True: start again after the last line.
        skip: number of lines to leave out, counted over all repetitions. Repetitions that are left out are not read.
        max_bytes: maximum length of a line. A longer one is cut to one byte more, so that a length check refuses it.
    """
    once = _lines(path, header, max_bytes)
    first = next(once, None)
    if first is None:
        raise ConfigError(f"{path}: expected at least one line{' after the header' * header}, got none")
    lines: Iterator[bytes] = itertools.chain((first,), once)
    skipped = sum(1 for _ in itertools.islice(lines, skip))
    if not repeat:
        return lines
    if skipped < skip:  # the file has `skipped` lines
        lines = itertools.islice(_lines(path, header, max_bytes), skip % skipped, None)
    again = itertools.chain.from_iterable(_lines(path, header, max_bytes) for _ in itertools.count())
    return itertools.chain(lines, again)


def read_header(path: Path) -> bytes:
    """Return the line that `read_file` leaves out with `header`. Raise ConfigError if the file cannot be read."""
    return next(_all(path, _LONGEST_BYTES), b"")


def _lines(path: Path, header: bool, max_bytes: int) -> Iterator[bytes]:
    return filter(None, itertools.islice(_all(path, max_bytes), int(header), None))


def _all(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, including blank lines."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in _cut(cast("BinaryIO", file), max_bytes):
                yield line.rstrip(b"\r\n")[: max_bytes + 1]
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(
            f"{path}: expected a readable file of lines: {getattr(exc, 'strerror', None) or exc}"
        ) from exc


def _cut(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, each cut to about `max_bytes`. Memory use does not depend on the length of a line."""
    while line := file.readline(max_bytes + 2):
        yield line
        while not line.endswith(b"\n") and (line := file.readline(_CHUNK_BYTES)):
            pass


def read_pipe(descriptor: int, *, max_bytes: int, timeout_s: float = 0.02) -> Iterator[bytes | None]:
    """Yield the lines of a pipe or terminal when they arrive, without blank lines. Yield None after each `timeout_s` in
    which no line has arrived.

    A last line without line end counts as a line. A line longer than `max_bytes` is cut to `max_bytes` + 1 bytes, so
    that a length check refuses it.
    """
    rest = bytearray()  # beginning of the incomplete line
    while True:
        # Reads must not block, because the caller must be able to stop.
        if not select.select([descriptor], [], [], timeout_s)[0]:
            yield None
            continue
        chunk = os.read(descriptor, _CHUNK_BYTES)
        *ends, begun = chunk.split(b"\n")
        for end in ends:
            rest += end[: max_bytes + 2 - len(rest)]
            if line := bytes(rest.rstrip(b"\r")):
                yield line[: max_bytes + 1]
            rest.clear()
        rest += begun[: max_bytes + 2 - len(rest)]
        if not chunk:
            if line := bytes(rest.rstrip(b"\r")):
                yield line[: max_bytes + 1]
            return
