"""Rows of Parquet files, read by row group. The footers contain the row counts, so earlier row groups are not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from doll.errors import ConfigError
from doll.producers.sources.table_rows import BLOCK_ROWS, check_columns

_HIDDEN: Final = "._"  # first letters of files that other programs write: `._a.parquet` of macOS, `_metadata` of Spark


class _File(NamedTuple):
    path: Path
    begin: int  # number of its first row, counted over all files
    groups: tuple[int, ...]  # number of rows of each row group


class ParquetFiles:
    """One file, or the files of a folder in the order of their names. See `table_rows.TableRows`."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        """
        Args:
            columns: names of the columns to read; empty: all.

        Raises:
            ConfigError: there is no file, a file cannot be read or lacks a column, or the files have no rows.
        """
        self._columns = list(columns) or None
        self._files: list[_File] = []
        self.count = 0
        paths = (
            sorted(file for file in path.glob("*.parquet") if file.name[0] not in _HIDDEN) if path.is_dir() else [path]
        )
        if not paths:
            raise ConfigError(f"{path}: expected files *.parquet in the folder, got none")
        for file in paths:
            with _opened(file) as parquet:
                check_columns(str(file), parquet.schema_arrow, columns)
                about = parquet.metadata
                groups = tuple(about.row_group(group).num_rows for group in range(about.num_row_groups))
            self._files.append(_File(file, self.count, groups))
            self.count += sum(groups)
        if not self.count:
            raise ConfigError(f"{path}: expected at least one row, got none")

    def blocks(self, first: int) -> Iterator[tuple[int, str, int, Any]]:
        for file in self._files:
            if first < file.begin + sum(file.groups):
                yield from self._blocks(file, first)

    def _blocks(self, file: _File, first: int) -> Iterator[tuple[int, str, int, Any]]:
        at = file.begin
        with _opened(file.path) as parquet:
            for group, rows in enumerate(file.groups):
                if (end := at + rows) <= first:
                    at = end
                    continue
                try:
                    for batch in parquet.iter_batches(
                        BLOCK_ROWS, row_groups=[group], columns=self._columns, use_threads=False
                    ):
                        if at + len(batch) > first:
                            yield at, str(file.path), at - file.begin, pa.Table.from_batches([batch])
                        at += len(batch)
                except (pa.ArrowException, OSError) as exc:
                    raise ConfigError(
                        f"{file.path}, row group {group} (rows from {at - file.begin} on): expected readable Parquet: "
                        f"{exc}"
                    ) from exc


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as exc:
        raise ConfigError(f"{path}: expected a readable Parquet file: {exc}") from exc
