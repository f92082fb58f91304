"""Columns of CSV by their names: which cells are sent, and what becomes of lines that have not the file's columns."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doll.errors import ConfigError, SampleError
from doll.formats.csv_lines import CsvReader
from doll.producers import sources
from job_files import job
from structlog.testing import capture_logs

COLUMNS = "columns: [fare, zone]"
FILE = b'id,zone,note,fare\n1,north,"a, b",2.5\n2,"so, uth",,3\n\n3,west,"""q""",\n'


class Trip(msgspec.Struct):
    zone: str
    fare: float = -1.0


def streams(folder: Path, content: bytes, more: str = COLUMNS, count: int = 1, positions: Any = ()) -> Any:
    (folder / "d.csv").write_bytes(content)
    config = job(text=f"source: {{kind: csv, path: d.csv, header: true, {more}}}", workers=count, folder=folder)
    return sources.open_streams(config, [0] * count, positions)


def test_the_cells_of_the_columns_are_sent_in_their_order(tmp_path: Path) -> None:
    (stream,) = streams(tmp_path, FILE)
    values = list(stream)
    assert values == [b"2.5,north", b'3,"so, uth"', b",west"]
    read = CsvReader(Trip, ["fare", "zone"], ",").read(values)
    assert read == [Trip("north", 2.5), Trip("so, uth", 3), Trip("west")]


def test_streams_share_the_rows_and_go_on_where_they_were(tmp_path: Path) -> None:
    content = b"zone,fare\n" + b"".join(b"z%d,%d\n" % (n, n) for n in range(7))
    taken = [list(stream) for stream in streams(tmp_path, content, count=3, positions=[1, 0, 2])]
    assert taken == [[b"3,z3", b"6,z6"], [b"1,z1", b"4,z4"], []]
    (again,) = streams(tmp_path, content, f"{COLUMNS}, repeat: true", positions=[9])
    assert list(itertools.islice(again, 6)) == [b"2,z2", b"3,z3", b"4,z4", b"5,z5", b"6,z6", b"0,z0"]


def test_compressed_files_byte_order_marks_and_other_delimiters(tmp_path: Path) -> None:
    content = "\ufeffzone;fare\nä;1\n".encode()
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(content))
    source = "{kind: csv, path: d.csv.gz, header: true, columns: [fare, zone], delimiter: ;}"
    (stream,) = sources.open_streams(job(text=f"source: {source}", workers=1, folder=tmp_path), [0])
    assert list(stream) == ["1;ä".encode()]


@pytest.mark.parametrize(
    ("bad", "row"),
    [(b"7,east", 2), (b"7,east,x,1,9", 2), (b'7,"east,x,1', 2), (b"7,\xff\xfe,x,1", 2), (b"7", 2), (b"7,e,x", 2)],
)
def test_a_line_that_has_not_the_columns_is_a_record_that_is_refused(tmp_path: Path, bad: bytes, row: int) -> None:
    header, first, *rest = FILE.splitlines()
    (stream,) = streams(tmp_path, b"\n".join([header, first, bad, *rest]))
    with capture_logs() as logs:
        values = list(stream)
    assert len(values) == 4, "each row is a record: positions count them"
    assert values[1].startswith(bad)
    reader = CsvReader(Trip, ["fare", "zone"], ",")
    for at, value in enumerate(values):
        if at == 1:
            with pytest.raises((SampleError, ValueError)):
                reader.read_one(value)
        else:
            reader.read_one(value)
    (line,) = logs
    assert (line["event"], line["row"]) == ("row_unusable", row)
    assert line["file"].endswith("d.csv")


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (FILE, "columns: [fares, zone]", "d.csv: has no column fares .* it has id, zone, note, fare"),
        (b"zone,fare,zone\n1,2,3\n", COLUMNS, "d.csv: names column zone twice"),
        (b"\nzone,fare\n1,2\n", COLUMNS, "has no column fare, zone"),
        (b"\xff,fare\n1,2\n", COLUMNS, "expected a line of CSV that names its columns"),
    ],
)
def test_a_file_without_the_columns_is_refused_with_those_that_it_has(
    tmp_path: Path, content: bytes, more: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        streams(tmp_path, content, more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("source: {kind: csv, path: a, columns: [x]}", "columns: expected header: true"),
        ("source: {kind: csv, path: a, header: true, columns: [x, x]}", "columns: expected different names, got x, x"),
        (
            "source: {kind: csv, path: a, header: true, columns: [x, y]}\n"
            "data: {format: {kind: csv, columns: [y, x]}}",
            "data.format: expected columns x, y and delimiter ','",
        ),
    ],
)  # fmt: skip
def test_a_job_file_that_does_not_fit_together_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job(text=text)


def test_a_job_file_that_fits_is_taken() -> None:
    job(text="source: {kind: csv, path: a, header: true, columns: [x]}\ndata: {format: {kind: csv, columns: [x]}}")


def test_a_cell_may_be_as_long_as_a_record(tmp_path: Path) -> None:
    (stream,) = streams(tmp_path, b"x,n\n" + b"a" * 300_000 + b",1\n", "columns: [n, x]")
    assert next(stream) == b"1," + b"a" * 300_000
