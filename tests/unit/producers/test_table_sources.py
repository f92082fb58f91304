"""Rows of Parquet files and of data sets of Hugging Face: the values as JSON, positions, and rows that are damaged."""

from __future__ import annotations

import base64
import datetime
import decimal
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.formats.reader import JsonReader
from doll.producers import sources
from job_files import job

pa = pytest.importorskip("pyarrow", reason="needs the extra doll-online[parquet]")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.slow  # loads pyarrow


def config(folder: Path, source: str, workers: int = 1) -> JobConfig:
    return job(text=f"source: {source}", workers=workers, folder=folder)


def opened(folder: Path, source: str, workers: int = 1, positions: Any = ()) -> list[Iterator[bytes]]:
    return sources.open_streams(config(folder, source, workers), [0] * workers, positions)


def numbers(stream: Iterator[bytes], count: int | None = None) -> list[int]:
    return [json.loads(value)["n"] for value in itertools.islice(stream, count)]


def write(path: Path, begin: int, count: int, group: int) -> None:
    table = pa.table({"n": np.arange(begin, begin + count), "half": np.arange(count) / 2})
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture(params=["parquet", "parquet of several files", "dataset"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A source of 5,000 rows whose `n` is their number."""
    if request.param == "parquet":
        write(tmp_path / "d.parquet", 0, 5000, 700)
        return "kind: parquet, path: d.parquet"
    if request.param == "dataset":
        datasets = pytest.importorskip("datasets", reason="needs the extra doll-online[datasets]")
        datasets.Dataset.from_dict({"n": list(range(5000)), "half": [0.5] * 5000}).save_to_disk(tmp_path / "d")
        return "kind: dataset, path: d"
    (tmp_path / "parts").mkdir()
    for part, (begin, count) in enumerate([(0, 1), (1, 2999), (3000, 0), (3000, 2000)]):
        write(tmp_path / "parts" / f"part-{part}.parquet", begin, count, 1024)
    (tmp_path / "parts" / "_SUCCESS").write_bytes(b"")
    (tmp_path / "parts" / "._part-0.parquet").write_bytes(b"what macOS keeps beside a file")
    (tmp_path / "parts" / "_meta.parquet").write_bytes(b"")
    return "kind: parquet, path: parts"


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_row_i_goes_to_stream_i_mod_n(rows: str, workers: int, tmp_path: Path) -> None:
    for at, stream in enumerate(opened(tmp_path, f"{{{rows}}}", workers)):
        assert numbers(stream) == list(range(at, 5000, workers))


def test_a_stream_goes_on_behind_what_it_was_given(rows: str, tmp_path: Path) -> None:
    for position in (0, 1, 699, 1500, 2499, 2500):
        first, second = opened(tmp_path, f"{{{rows}}}", 2, [position, 7])
        assert numbers(first) == list(range(2 * position, 5000, 2))
        assert numbers(second, 3) == [15, 17, 19]


def test_a_repetition_deals_the_rows_out_as_one_long_stream(rows: str, tmp_path: Path) -> None:
    for position in (0, 1600, 2400, 4999):
        streams = opened(tmp_path, f"{{{rows}, repeat: true}}", 3, [position] * 3)
        for at, stream in enumerate(streams):
            assert numbers(stream, 1800) == [(at + 3 * (position + k)) % 5000 for k in range(1800)]


def test_only_the_columns_that_are_named_are_sent(rows: str, tmp_path: Path) -> None:
    (stream,) = opened(tmp_path, f"{{{rows}, columns: [half]}}")
    assert next(stream).startswith(b'{"half":0.')


def test_no_more_than_a_block_is_read_ahead(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows before the position are passed over, and rows behind it are made into records when they are asked for."""
    from doll.producers.sources import table_rows

    taken: list[int] = []
    values = table_rows.values_of
    monkeypatch.setattr(table_rows, "values_of", lambda table: taken.append(len(table)) or values(table))
    (stream,) = opened(tmp_path, f"{{{rows}}}", positions=[3500])
    assert numbers(stream, 1) == [3500]
    assert sum(taken) <= table_rows.BLOCK_ROWS


class Row(msgspec.Struct):
    id: int
    at: datetime.datetime
    day: datetime.date
    price: decimal.Decimal
    fare: float
    name: str
    tags: list[int]
    where: dict[str, float]
    raw: bytes
    kind: str
    small: float
    gone: float | None


def test_every_kind_of_value_reaches_a_task_as_it_was(tmp_path: Path) -> None:
    at = datetime.datetime(2024, 1, 1, 12, 30, 15, 250_000, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "id": pa.array([2**63 - 1]), "at": pa.array([at], pa.timestamp("ns", "UTC")),
            "day": pa.array([at.date()]), "price": pa.array([decimal.Decimal("12.50")]),
            "fare": pa.array([decimal.Decimal("3.25")]), "name": pa.array(["Zürich"]), "tags": pa.array([[1, 2**60]]),
            "where": pa.array([{"x": 1.5}]), "raw": pa.array([b"\x00\xff"]),
            "kind": pa.array(["a"]).dictionary_encode(), "small": pa.array(np.array([0.5], np.float16)),
            "gone": pa.array([None], pa.float64()),
        }
    )  # fmt: skip
    pq.write_table(table, tmp_path / "d.parquet")
    (stream,) = opened(tmp_path, "{kind: parquet, path: d.parquet}")
    row = JsonReader(Row).read_one(next(stream))
    assert (row.id, row.at, row.day, row.price, row.fare) == (2**63 - 1, at, at.date(), decimal.Decimal("12.50"), 3.25)
    assert (row.name, row.tags, row.where, row.raw) == ("Zürich", [1, 2**60], {"x": 1.5}, b"\x00\xff")
    assert (row.kind, row.small, row.gone) == ("a", 0.5, None)


def test_a_row_that_cannot_be_read_is_a_record_that_says_where_and_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = pa.array([b"a", b"\xff\xfe", b"c"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.utf8(), 3, names.buffers())
    pq.write_table(pa.table({"n": [0, 1, 2], "name": text}), tmp_path / "d.parquet")
    (stream,) = opened(tmp_path, "{kind: parquet, path: d.parquet}")
    first, bad, last = stream
    assert (json.loads(first)["n"], json.loads(last)["n"]) == (0, 2)
    assert bad.startswith(f"{tmp_path / 'd.parquet'}, row 1, column name: UnicodeDecodeError".encode())
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(bad)
    assert "row_unusable" in "".join(capsys.readouterr())


def test_a_record_that_is_too_long_is_cut_where_it_will_be_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 5000]}), tmp_path / "d.parquet")
    text = "source: {kind: parquet, path: d.parquet}\ndata: {max_record_bytes: 1000, workers: 1}"
    (stream,) = sources.open_streams(job(text=text, folder=tmp_path), [0])
    assert len(next(stream)) == 1001


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (None, "", "d.parquet: expected a readable Parquet file: "),
        (b"hello, world", "", "d.parquet: expected a readable Parquet file: "),
        ({"n": [1]}, ", columns: [m]", r"d.parquet: has no column m \(source.columns\); it has n"),
        ({"n": []}, "", "d.parquet: expected at least one row, got none"),
    ],
)
def test_a_file_that_is_not_what_was_expected_is_refused_at_once(
    tmp_path: Path, content: Any, more: str, words: str
) -> None:
    if isinstance(content, bytes):
        (tmp_path / "d.parquet").write_bytes(content)
    elif content is not None:
        pq.write_table(pa.table(content), tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path, f"{{kind: parquet, path: d.parquet{more}}}")


@pytest.mark.parametrize("view", ["string_view", "binary_view"])
def test_views_are_texts_and_bytes_at_every_depth(tmp_path: Path, view: str) -> None:
    """As polars and Arrow write them: Arrow has no kernel that takes rows of them."""
    kind, cells = getattr(pa, view)(), ["short", None, "a text that is longer than twelve bytes"]
    kinds = [kind, pa.list_(kind), pa.struct([("b", kind)])]
    columns = [cells, [[cell] for cell in cells], [{"b": cell} for cell in cells]]
    names = ["t", "many", "in"]
    values = [pa.array(column, of).cast(of) for column, of in zip(columns, kinds, strict=True)]
    pq.write_table(pa.table(dict(zip(names, values, strict=True))), tmp_path / "d.parquet")
    rows = list(map(json.loads, opened(tmp_path, "{kind: parquet, path: d.parquet}")[0]))
    shown = [
        cell if cell is None or view == "string_view" else base64.b64encode(cell.encode()).decode() for cell in cells
    ]
    assert rows == [{"t": cell, "many": [cell], "in": {"b": cell}} for cell in shown]


def test_values_that_json_has_not_are_refused_by_their_column(tmp_path: Path) -> None:
    from doll.producers.sources.table_rows import check_columns

    schema = pa.schema([("n", pa.int64()), ("span", pa.list_(pa.month_day_nano_interval()))])
    with pytest.raises(ConfigError, match=r"here: column span: values of Arrow's type .*interval.*: leave it out"):
        check_columns("here", schema, [])
    check_columns("here", schema, ["n"])


def test_a_file_damaged_further_on_is_named_with_its_row_group_when_it_is_reached(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    rng = np.random.default_rng(0)
    table = pa.table({"n": np.arange(4000), "noise": rng.integers(0, 2**62, 4000)})
    pq.write_table(table, path, row_group_size=1000, compression="zstd")
    about = pq.ParquetFile(path).metadata.row_group(2).column(1)
    data = bytearray(path.read_bytes())
    data[about.data_page_offset : about.data_page_offset + 400] = bytes(400)
    path.write_bytes(data)
    (stream,) = opened(tmp_path, "{kind: parquet, path: d.parquet}")
    assert numbers(stream, 2000) == list(range(2000))
    with pytest.raises(ConfigError, match=r"d.parquet, row group 2 \(rows from 2000 on\): expected readable Parquet"):
        next(stream)


def test_a_file_that_is_shorter_in_a_later_pass_ends_the_stream(tmp_path: Path) -> None:
    write(tmp_path / "d.parquet", 0, 10, 10)
    (stream,) = opened(tmp_path, "{kind: parquet, path: d.parquet, repeat: true}")
    assert numbers(stream, 5) == [0, 1, 2, 3, 4]
    write(tmp_path / "e.parquet", 0, 2, 10)
    os.replace(tmp_path / "e.parquet", tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match=r"row group 0|expected 10 rows, got fewer"):
        numbers(stream, 100)


def test_an_empty_folder_and_a_missing_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected files \*.parquet in the folder, got none"):
        opened(tmp_path, "{kind: parquet, path: .}")
    datasets = pytest.importorskip("datasets", reason="needs the extra doll-online[datasets]")
    one = datasets.Dataset.from_dict({"n": [1]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    one.save_to_disk(tmp_path / "one")
    for source, words in (
        ("{kind: dataset, path: both}", "source.split: .*both has train, test, got None"),
        ("{kind: dataset, path: both, split: dev}", "source.split: .*both has train, test, got dev"),
        ("{kind: dataset, path: one, split: train}", "source.split: expected none"),
        ("{kind: dataset, path: none}", "none: expected a data set that save_to_disk has written"),
        ("{kind: dataset, path: one, columns: [m]}", "one: has no column m"),
    ):
        with pytest.raises(ConfigError, match=words):
            opened(tmp_path, source)
    (stream,) = opened(tmp_path, "{kind: dataset, path: both, split: test}")
    assert list(stream) == [b'{"n":1}']
