"""Clicks in Criteo's format: a line of 40 cells, and the packed record that the source and the generator send.

A line has tabs between its cells: the label (1: clicked), 13 counts, 26 categories as 32-bit numbers in hex. Counts and
categories may be empty. The packed record is `RECORD`: 157 bytes where a line has about 240, and it needs no parsing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.errors import SampleError

COUNTS: Final = 13
CATEGORIES: Final = 26
LOWEST_COUNT: Final = -3  # the second count of the published file has values down to -3
HIGHEST_COUNT: Final = 2**31 - 1
NO_COUNT: Final = -(2**31)  # stands for an empty cell
NO_CATEGORY: Final = 0  # as above; a category whose number is 0 counts as an empty cell

RECORD: Final = np.dtype([("label", "u1"), ("counts", "<i4", COUNTS), ("categories", "<u4", CATEGORIES)])

_CELLS: Final = 1 + COUNTS + CATEGORIES
_PACKED: Final = struct.Struct(f"<B{COUNTS}i{CATEGORIES}I")
_COUNT: Final = rb"-[1-3]|[0-9]{1,10}"
_CATEGORY: Final = rb"[0-9a-fA-F]{1,8}"
_LINE: Final = re.compile(
    rb"[01](?:\t(?:%b)?){%d}(?:\t(?:%b)?){%d}" % (_COUNT, COUNTS, _CATEGORY, CATEGORIES)
)  # fmt: skip
_SHOWN: Final = 40  # bytes of a cell in an error message


def pack_line(line: bytes) -> bytes:
    """The packed record of a line.

    Raises:
        SampleError: not 40 cells, or a cell that is not what was expected.
    """
    line = line.rstrip(b"\r\n")
    if _LINE.fullmatch(line):
        label, *cells = line.split(b"\t")
        counts = [int(cell) if cell else NO_COUNT for cell in cells[:COUNTS]]
        if max(counts) <= HIGHEST_COUNT:
            categories = [int(cell, 16) if cell else NO_CATEGORY for cell in cells[COUNTS:]]
            return _PACKED.pack(int(label), *counts, *categories)
    raise SampleError(_problem(line))


def _problem(line: bytes) -> str:
    """What is wrong with a line that `pack_line` does not take."""
    cells = line.split(b"\t")
    if len(cells) != _CELLS:
        return (
            f"expected a packed record of {RECORD.itemsize} bytes, or {_CELLS} cells with tabs between (label, "
            f"{COUNTS} counts, {CATEGORIES} categories), got {len(cells)} cells in {len(line)} bytes"
        )
    if cells[0] not in (b"0", b"1"):
        return f"expected 0 or 1 in cell 1 (the label), got {cells[0][:_SHOWN]!r}"
    for at, cell in enumerate(cells[1 : COUNTS + 1], 2):
        if cell and not (re.fullmatch(_COUNT, cell) and int(cell) <= HIGHEST_COUNT):
            return (
                f"cell {at}: expected a count of {LOWEST_COUNT} to {HIGHEST_COUNT}, or nothing; got {cell[:_SHOWN]!r}"
            )
    for at, cell in enumerate(cells[COUNTS + 1 :], COUNTS + 2):
        if cell and not re.fullmatch(_CATEGORY, cell):
            return f"cell {at}: expected a category of 1 to 8 hex digits, or nothing; got {cell[:_SHOWN]!r}"
    raise AssertionError("the line is good")


def is_packed(record: bytes) -> bool:
    """Whether a record has the form of a packed one: of its length, and it does not begin as text does."""
    return len(record) == RECORD.itemsize and record[0] < ord(" ")


def check(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which packed records are good: the label is 0 or 1, and no count is below the lowest.

    Args:
        rows: of dtype `RECORD`, shape (n,).

    Returns:
        Shape (n,).
    """
    counts = rows["counts"]
    good: npt.NDArray[np.bool_] = (rows["label"] <= 1) & ((counts >= LOWEST_COUNT) | (counts == NO_COUNT)).all(axis=1)
    return good


def problem_of(record: bytes) -> str:
    """What is wrong with a packed record that `check` does not accept; "" where nothing is."""
    row = np.frombuffer(record, RECORD)[0]
    if row["label"] > 1:
        return f"expected 0 or 1 in the first byte (the label), got {row['label']}"
    for at, count in enumerate(row["counts"].tolist(), 1):
        if count < LOWEST_COUNT and count != NO_COUNT:
            return f"count {at}: expected {LOWEST_COUNT} to {HIGHEST_COUNT}, or {NO_COUNT} for none; got {count}"
    return ""


def records(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The packed records of these lines, in order. A line that is not good is a record as it is: a worker refuses it,
    and it is kept as a dead letter."""
    for line in lines:
        try:
            yield pack_line(line)
        except SampleError:
            yield line
