"""Rows of Hugging Face data sets on disk (`Dataset.save_to_disk`). They are mapped into memory, not read into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from doll.errors import ConfigError
from doll.producers.sources.table_rows import BLOCK_ROWS, check_columns


class DatasetRows:
    """The rows of a data set. See `table_rows.TableRows`."""

    def __init__(self, path: Path, split: str | None, columns: Sequence[str]) -> None:
        """
        Args:
            split: name of the split in a `DatasetDict`. None: the folder contains a single data set.
            columns: names of the columns to read; empty: all.

        Raises:
            ConfigError: the folder contains no such data set, or the data set lacks a column or has no rows.
        """
        self._path = str(path)
        try:
            loaded = datasets.load_from_disk(self._path)
        except Exception as exc:  # many types: no folder, no JSON, no Arrow file
            raise ConfigError(f"{path}: expected a data set that save_to_disk has written: {exc}") from exc
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise ConfigError(f"source.split: {path} has {', '.join(loaded)}, got {split}")
            loaded = loaded[split]
        elif split is not None:
            raise ConfigError(f"source.split: expected none, because {path} is one data set; got {split}")
        check_columns(self._path, loaded.features.arrow_schema, columns)
        self._rows: Any = (loaded.select_columns(list(columns)) if columns else loaded).with_format("arrow")
        self.count = len(self._rows)
        if not self.count:
            raise ConfigError(f"{path}: expected at least one row, got none")

    def blocks(self, first: int) -> Iterator[tuple[int, str, int, Any]]:
        for at in range(first, self.count, BLOCK_ROWS):
            try:
                table = self._rows[at : at + BLOCK_ROWS]
            except Exception as exc:
                raise ConfigError(f"{self._path}, rows from {at} on: expected readable rows: {exc}") from exc
            yield at, self._path, at, table
