"""A table as a file: rows are appended, and written again in parts where earlier ones have changed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from doll.monitor.state.csv_file import CsvFile, read_rows
from doll.monitor.state.history import UPDATE_COLUMNS, MetricTable


def filled(rows: int) -> MetricTable:
    table = MetricTable(UPDATE_COLUMNS)
    for version in range(rows):
        table.append({"time_s": 0.5 * version, "term": 1, "version": version, "apply_s": 0.001})
    return table


def test_it_holds_every_row_once_however_it_is_written(tmp_path: Path) -> None:
    table = filled(2_500)
    file = CsvFile(tmp_path / "a.csv", table)
    file.sync()
    for version in range(2_500, 4_700):
        table.append({"version": version})
    file.sync()
    appended = file.path.read_text()
    assert [row["version"] for row in read_rows(file.path)] == list(range(4_700))
    file.sync(changed=True)
    assert file.path.read_text() == appended


def test_writing_a_long_run_anew_takes_little_memory(tmp_path: Path) -> None:
    """As text all rows of an hour would take 100 MB, each time that a parameter server has died."""
    table = filled(10_000)
    tracemalloc.start()
    try:
        CsvFile(tmp_path / "a.csv", table).sync()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3_000_000
