"""Rows of a table of history come once, in the order of their time, from any place on."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doll.config.source import HistorySource
from doll.errors import ConfigError
from doll.producers.handover import identity
from doll.producers.sources.history_tables import HistoryTable, most_held

BASE_MS = 1_700_000_000_000


def source(**more: Any) -> HistorySource:
    given = {
        "kind": "history", "table": "t", "topic": "clicks", "time": "at",
        "handover": {"partition": "p", "offset": "o"}, **more,
    }  # fmt: skip
    return HistorySource.model_validate(given)


def write(path: Path, times: list[int], first: int = 0, *, group: int = 7, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = list(range(first, first + len(times)))
    columns = {"id": ids, "at": [BASE_MS + at for at in times], "p": [at % 3 for at in ids], "o": ids, **more}
    pq.write_table(pa.table(columns), path, row_group_size=group)


def ids_of(table: HistoryTable, piece: int = 0, base: int = 0) -> list[int]:
    return [at for _, _, rows in table.chunks(piece, base) for at in rows.column("id").to_pylist()]


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_overlapping_files_come_in_order_and_from_each_piece_on(tmp_path: Path, seed: int) -> None:
    rng, first = random.Random(seed), 0
    time_of: dict[int, int] = {}
    for number in range(rng.randint(1, 4)):
        times = [rng.randint(0, 60) + 20 * number for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.5:
            times.sort()
        time_of |= dict(enumerate(times, first))
        write(tmp_path / f"{number}.parquet", times, first, group=rng.randint(3, 20))
        first += len(times)
    table = HistoryTable(source(), str(tmp_path))
    chunks = [(piece, base, rows.column("id").to_pylist()) for piece, base, rows in table.chunks(0, 0)]
    whole = [at for _, _, ids in chunks for at in ids]
    assert sorted(whole) == list(range(first)) == list(range(table.rows))
    assert [time_of[at] for at in whole] == sorted(time_of.values())
    for piece, base, _ in rng.sample(chunks, min(4, len(chunks))):
        assert ids_of(table, piece, base) == whole[base:]
    assert ids_of(HistoryTable(source(), str(tmp_path), [file.name for file in table.files])) == whole


def test_one_file_a_folder_of_partitions_and_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "a.parquet", [3, 1, 2])
    write(tmp_path / "day=2" / "a.parquet", [5, 4], 3)
    write(tmp_path / "_old" / "a.parquet", [0], 9)
    write(tmp_path / ".a.parquet", [0], 9)
    table = HistoryTable(source(), str(tmp_path))
    assert ids_of(table) == [1, 2, 0, 4, 3]
    assert [file.name for file in table.files] == ["day=1/a.parquet", "day=2/a.parquet"]
    (rows,) = [rows for _, base, rows in table.chunks(0, 0) if base == 0]
    assert next(iter(table.values(rows, 100))) == b'{"id":1,"at":1700000000001,"p":1,"o":1,"day":1}'
    assert ids_of(HistoryTable(source(), str(tmp_path / "day=1" / "a.parquet"))) == [1, 2, 0]
    assert table.last_offsets() == {0: (0, 3, 2), 1: (1, 4, 2), 2: (2, 2, 1)}


@pytest.mark.slow
def test_a_folder_in_a_bucket_is_read_as_a_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"), ("AWS_ENDPOINT_URL", address),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="lake")
        for name, times, first in (("a", [3, 1, 2], 0), ("b", [5, 4], 3)):
            write(tmp_path / name, times, first)
            client.upload_file(str(tmp_path / name), "lake", f"clicks/day=1/{name}.parquet")
        table = HistoryTable(source(), "s3://lake/clicks/")
        assert ids_of(table) == [1, 2, 0, 4, 3]
        assert [file.name for file in table.files] == ["day=1/a.parquet", "day=1/b.parquet"]
        again = HistoryTable(source(), "s3://lake/clicks/", [file.name for file in table.files])
        assert again.files == table.files
    finally:
        server.stop()


def test_times_of_each_type_and_unit_are_the_same_times(tmp_path: Path) -> None:
    seconds = [1_700_000_000.5, 1_700_000_001.25]
    forms: dict[str, tuple[Any, str]] = {
        "s": (seconds, "s"), "ms": ([int(at * 1e3) for at in seconds], "ms"),
        "ns": ([int(at * 1e3) * 10**6 for at in seconds], "ns"),
        "stamp": (pa.array([datetime.fromtimestamp(at, UTC) for at in seconds], pa.timestamp("ns", "UTC")), "ms"),
    }  # fmt: skip
    for name, (column, unit) in forms.items():
        folder = tmp_path / name
        write(folder / "a.parquet", [0, 0], at=column)
        of = source(time={"field": "at", "unit": unit}, handover={"key": "id", "overlap_s": 10})
        table = HistoryTable(of, str(folder))
        assert table.end_us == 1_700_000_001_250_000, name
        assert list(table.identities(1_700_000_001_000_000)) == [identity("1", 1_700_000_001_250_000)]


def test_a_row_without_a_time_and_a_column_of_values_are_sent(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [0, 0, 0], at=[BASE_MS + 5, None, BASE_MS], v=[b"five", b"none", None])
    table = HistoryTable(source(value="v"), str(tmp_path))
    (chunk,) = [rows for _, _, rows in table.chunks(0, 0)]
    assert list(table.values(chunk, 3)) == [b"non", None, b"fiv"]


def test_a_table_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    def refuse(match: str, folder: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            HistoryTable(source(**more), str(tmp_path / folder)).last_offsets()

    (tmp_path / "empty").mkdir()
    refuse("expected files", "empty")
    refuse("expected readable files", "nowhere")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.parquet").write_text("no")
    refuse("expected readable files", "text")
    write(tmp_path / "good" / "a.parquet", [0, 1])
    refuse("has no column other", "good", time="other")
    refuse("has no column other", "good", columns=["other"])
    write(tmp_path / "words" / "a.parquet", [0], at=["yesterday"])
    refuse("expected a timestamp, or a number", "words")
    write(
        tmp_path / "none" / "a.parquet",
        [],
        at=pa.array([], pa.int64()),
        p=pa.array([], pa.int64()),
        o=pa.array([], pa.int64()),
    )
    refuse("at least one row", "none")
    write(tmp_path / "null" / "a.parquet", [0, 1], o=[1, None])
    refuse("partition and offset in each row", "null")
    write(tmp_path / "two" / "a.parquet", [0, 1])
    pq.write_table(pa.table({"at": [1], "p": [1], "o": [1]}), tmp_path / "two" / "b.parquet")
    refuse("b.parquet: column id: expected int64, as in the first file, got None", "two")
    pq.write_table(pa.table({"id": ["x"], "at": [1], "p": [1], "o": [1]}), tmp_path / "two" / "b.parquet")
    refuse("b.parquet: column id: expected int64", "two")


def test_files_that_overlap_more_than_the_memory_holds_are_refused(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes
    for number in range(4):
        write(tmp_path / f"{number}.parquet", [0, 100], v=[noise(300_000), noise(300_000)])
    with pytest.raises(ConfigError, match="because their times overlap"):
        HistoryTable(source(memory_bytes=1_048_576), str(tmp_path))
    assert HistoryTable(source(), str(tmp_path)).rows == 8
    assert most_held([]) == 0


def test_a_delta_table_is_read_at_the_version_of_the_beginning(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    rows = {"id": [0, 1], "at": [BASE_MS + 1, BASE_MS], "p": [0, 0], "o": [0, 1]}
    deltalake.write_deltalake(str(tmp_path), pa.table(rows))
    of = source(format="delta")
    table = HistoryTable(of, str(tmp_path))
    assert (ids_of(table), table.version) == ([1, 0], 0)
    deltalake.write_deltalake(str(tmp_path), pa.table(rows), mode="overwrite")
    assert HistoryTable(of, str(tmp_path)).version == 1
    again = HistoryTable(of, str(tmp_path), [file.name for file in table.files], 0)
    assert again.files == table.files
    with pytest.raises(ConfigError, match="expected a readable Delta table"):
        HistoryTable(of, str(tmp_path / "none"))


def test_an_iceberg_table_is_read_at_the_snapshot_of_the_beginning(tmp_path: Path) -> None:
    catalogs = pytest.importorskip("pyiceberg.catalog.memory")
    catalog = catalogs.InMemoryCatalog("t", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("lake")
    rows = pa.table({"id": [0, 1, 2], "at": [BASE_MS + 2, BASE_MS, BASE_MS + 1], "p": [0, 0, 1], "o": [0, 1, 0]})
    made = catalog.create_table("lake.clicks", rows.schema)
    made.append(rows)
    of, folder = source(format="iceberg"), made.location().removeprefix("file://")
    table = HistoryTable(of, folder)
    first = made.current_snapshot().snapshot_id
    assert (ids_of(table), table.version) == ([1, 2, 0], first)
    assert table.last_offsets() == {0: (0, 1, 2), 1: (0, 0, 1)}
    made.append(pa.table({"id": [3], "at": [BASE_MS + 9], "p": [1], "o": [1]}))
    assert ids_of(HistoryTable(of, folder)) == [1, 2, 0, 3]
    again = HistoryTable(of, folder, [file.name for file in table.files], first)
    assert (again.files, ids_of(again)) == (table.files, [1, 2, 0])
    assert ids_of(HistoryTable(of, made.metadata_location.removeprefix("file://"))) == [1, 2, 0, 3]
    with made.update_schema() as update:
        update.rename_column("id", "number")
    with pytest.raises(ConfigError, match="column id was added, renamed or dropped after some files were written"):
        HistoryTable(of, folder)
    with pytest.raises(ConfigError, match="expected a readable Iceberg table"):
        HistoryTable(of, str(tmp_path / "none"))
    (tmp_path / "torn.metadata.json").write_text("{")
    with pytest.raises(ConfigError, match="expected a readable Iceberg table"):
        HistoryTable(of, str(tmp_path / "torn.metadata.json"))
