"""Rows of a table of history, merged in the order of their event time: Parquet files, a Delta or an Iceberg table.

Each format opens as a data set of Arrow. A row group is a piece. Pieces are read in the order of their lowest times, so
only pieces whose times overlap are in memory together. The order of the rows depends only on the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import io
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from doll.config.source import HistorySource
from doll.errors import ConfigError
from doll.extras import lacking
from doll.producers.handover import US_PER_UNIT, FileMark, identity
from doll.producers.sources.table_rows import Unreadable, check_columns, values_of, without_views
from doll.records.bounded import short

_NO_TIME: Final = np.iinfo(np.int64).min  # of a row without a time: it comes before the others of its piece
_METADATA: Final = re.compile(r"v?(\d+).*\.metadata\.json")
_AT_ONCE: Final = 16  # files whose footers are read together


class _Piece(NamedTuple):
    low_us: int
    file: int
    group: int
    high_us: int
    rows: int
    num_bytes: int
    fragment: Any


def _open_parquet(path: str, files: Collection[str]) -> tuple[Any, str]:
    """Return the data set of the files below a folder or an address, or of some of them; and the folder."""
    system, base = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    if system.get_file_info(base).type == fs.FileType.File:
        base, name = posixpath.split(base)
        files = files or [name]
    names = files or sorted(
        name
        for info in system.get_file_info(fs.FileSelector(base, recursive=True))
        if info.is_file and (name := info.path.removeprefix(base).lstrip("/")).endswith(".parquet")
        and not any(part[0] in "._" for part in name.split("/"))
    )  # fmt: skip
    if not names:
        raise ConfigError(f"source.table: {path}: expected files *.parquet in the folder, got none")
    paths = [posixpath.join(base, name) for name in names]
    layout = ds.partitioning(flavor="hive")
    return ds.dataset(paths, filesystem=system, format="parquet", partitioning=layout, partition_base_dir=base), base


def _open_delta(path: str, version: int | None) -> tuple[Any, int]:
    """Return the data set of a version of a Delta table; None: of the newest; and the version."""
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as exc:
        raise lacking("source.format: delta", "delta") from exc
    try:
        table = DeltaTable(path, version=version)
        return table.to_pyarrow_dataset(), table.version()
    except DeltaError as exc:
        raise ConfigError(f"source.table: {path}: expected a readable Delta table: {exc}") from exc


def _open_iceberg(path: str, version: int | None) -> tuple[Any, int]:
    """Return the data set of a snapshot of an Iceberg table; None: of the newest; and the id of the snapshot. `path`:
    folder of the table, or a file of its metadata."""
    try:
        from pyiceberg.table import StaticTable
    except ImportError as exc:
        raise lacking("source.format: iceberg", "iceberg") from exc
    try:
        table = StaticTable.from_metadata(_newest_metadata(path))
        snapshot = table.current_snapshot() if version is None else table.snapshot_by_id(version)
        tasks = [] if snapshot is None else list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files())
    except Exception as exc:  # the errors of pyiceberg have no base class of their own
        raise ConfigError(f"source.table: {path}: expected a readable Iceberg table: {short(exc)}") from exc
    if snapshot is None or not tasks:
        raise ConfigError(f"source.table: {path}: expected a snapshot {version or ''} with rows, got none")
    if any(task.delete_files for task in tasks):
        raise ConfigError(
            f"source.table: {path}: expected a table without delete files, because rows are read from the data files: "
            "rewrite the data files (copy on write)"
        )
    places = [fs.FileSystem.from_uri(task.file.file_path) for task in tasks]
    data = ds.dataset(sorted(name for _, name in places), filesystem=places[0][0], format="parquet")
    if changed := sorted({field.name for field in table.schema().fields} ^ set(data.schema.names)):
        raise ConfigError(
            f"source.table: {path}: column {changed[0]} was added, renamed or dropped after some files were written, "
            "and rows are read from the files: rewrite the data files"
        )
    return data, snapshot.snapshot_id


def _newest_metadata(path: str) -> str:
    """Return the newest file of metadata of an Iceberg table: its name begins with a number, as in 00003-....json."""
    if path.endswith(".json"):
        return path
    system, base = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    names = [posixpath.basename(info.path) for info in system.get_file_info(fs.FileSelector(f"{base}/metadata"))]
    numbered = [(int(match[1]), name) for name in names if (match := _METADATA.fullmatch(name))]
    if not numbered:
        raise ConfigError(f"source.table: {path}: expected the folder of an Iceberg table, got no metadata in it")
    return f"{path.rstrip('/')}/metadata/{max(numbered)[1]}"


class HistoryTable:
    """The table of a job's history.

    Attributes:
        version: the version of a Delta table, or the snapshot of an Iceberg table; 0 for Parquet files.
        end_us: the latest event time, microseconds since 1970.
    """

    def __init__(self, source: HistorySource, path: str, files: Collection[str] = (), version: int | None = None):
        """
        Args:
            path: absolute path of the table, or its address.
            files: the files to read, if they are known; empty: all.

        Raises:
            ConfigError: a file cannot be read or lacks a column, there are no rows, or too many overlap in time.
        """
        self._source, self._path, self.version = source, path, 0
        by, base = source.handover, ""
        with self._readable():
            if source.format == "delta":
                self._data, self.version = _open_delta(path, version)
            elif source.format == "iceberg":
                self._data, self.version = _open_iceberg(path, version)
            else:
                self._data, base = _open_parquet(path, files)
        self._columns = [source.value] if source.value else source.columns or self._data.schema.names
        keys = (source.time.field, by.partition, by.offset, by.key)
        self._wanted = list(dict.fromkeys([*self._columns, *filter(None, keys)]))
        check_columns(path, self._data.schema, self._wanted)
        self._check_types()
        with self._readable(), ThreadPoolExecutor(_AT_ONCE) as pool:
            fragments = list(self._data.get_fragments())
            self.files = tuple(pool.map(lambda fragment: self._mark(fragment, base), fragments))
            pieces = pool.map(self._pieces_of, range(len(fragments)), fragments)
            self._pieces = sorted((piece for of_file in pieces for piece in of_file), key=lambda piece: piece[:3])
        self.rows = sum(piece.rows for piece in self._pieces)
        self.end_us = max((piece.high_us for piece in self._pieces), default=_NO_TIME)
        if self.end_us == _NO_TIME:
            raise ConfigError(f"source.table: {path}: expected at least one row with a time, got {self.rows} rows")
        most = most_held((piece.low_us, piece.high_us, piece.num_bytes) for piece in self._pieces)
        if most > source.memory_bytes:
            raise ConfigError(
                f"source.table: {path}: row groups of {most} bytes are needed in memory together, because their times "
                f"overlap, and source.memory_bytes is {source.memory_bytes}: write files that are sorted by time and "
                "have smaller row groups, or raise it"
            )

    def chunks(self, piece: int, base: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the rows in order, from piece number `piece` on, whose first row has the number `base`. Each item is a
        piece with which some rows are complete, the number of the first of these rows, and the rows as a table."""
        since = self._pieces[piece].low_us
        before = [self._read(earlier) for earlier in self._pieces[:piece] if earlier.high_us >= since]
        held = [table.filter(pa.array(self._micros(table) >= since)) for table in before]
        for number in range(piece, len(self._pieces)):
            table = pa.concat_tables([*held, self._read(self._pieces[number])])
            times, held = self._micros(table), []
            if number + 1 < len(self._pieces):
                is_due = times < self._pieces[number + 1].low_us
                if not is_due.all():
                    held = [table.filter(pa.array(~is_due))]
                    table, times = table.filter(pa.array(is_due)), times[is_due]
            if (np.diff(times) < 0).any():
                table = table.take(pa.array(np.argsort(times, kind="stable")))
            yield number, base, table
            base += len(table)

    def values(self, table: Any, max_bytes: int) -> Iterator[bytes | None]:
        """Yield the records of rows, cut to `max_bytes`; why a row cannot be one is a record that workers refuse."""
        if self._source.value is not None:
            for value in table.column(self._source.value).to_pylist():
                text = value.encode() if isinstance(value, str) else value
                yield None if text is None else text[:max_bytes]
            return
        for record in values_of(table.select(self._columns)):
            if isinstance(record, Unreadable):
                record = f"{self._path}, column {record.column}: {record.reason}".encode()
            yield record[:max_bytes]

    def last_offsets(self) -> dict[int, tuple[int, int, int]]:
        """Return the first and the last offset, and the number of rows, of each partition of the topic. Raise
        ConfigError if a row has no partition or offset."""
        ends: dict[int, tuple[int, int, int]] = {}
        by = self._source.handover
        with self._readable():
            for batch in self._data.to_batches(columns=[str(by.partition), str(by.offset)]):
                if any(column.null_count for column in batch.columns):
                    raise ConfigError(f"source.handover: {self._path}: expected partition and offset in each row")
                partitions, offsets = (column.cast(pa.int64()).to_numpy() for column in batch.columns)
                for partition in np.unique(partitions).tolist():
                    own = offsets[partitions == partition]
                    first, last, count = ends.get(partition, (int(own[0]), -1, 0))
                    ends[partition] = min(first, int(own.min())), max(last, int(own.max())), count + len(own)
        return ends

    def identities(self, since_us: int) -> Iterator[int]:
        """Yield the identity of each row of this time or later."""
        for piece in self._pieces:
            if piece.high_us >= since_us:
                table = self._read(piece)
                keys = table.column(self._source.handover.key).to_pylist()
                times = self._micros(table).tolist()
                yield from (identity(key, at) for key, at in zip(keys, times, strict=True) if at >= since_us)

    def _check_types(self) -> None:
        source, by = self._source, self._source.handover

        def check(key: str, column: str | None, expected: str, *kinds: str) -> None:
            """Refuse a column whose type has none of these names."""
            of = None if column is None else self._data.schema.field(column).type
            if of is not None and not any(getattr(pa.types, f"is_{kind}")(of) for kind in kinds):
                raise ConfigError(f"source.{key}: column {column} of {self._path} is {of}: expected {expected}")

        numbers = () if source.time.unit == "iso8601" else ("integer", "floating")
        check(
            "time", source.time.field, "a timestamp, or a number with the unit s, ms, us or ns", "timestamp", *numbers
        )
        check("handover.partition", by.partition, "integers", "integer")
        check("handover.offset", by.offset, "integers", "integer")
        check("handover.key", by.key, "texts or integers", "integer", "string", "large_string")
        check("value", source.value, "bytes or text", "binary", "large_binary", "string", "large_string")

    def _mark(self, fragment: Any, base: str) -> FileMark:
        fragment.ensure_complete_metadata()
        own = fragment.physical_schema
        for name in self._wanted if self._source.format != "delta" else ():
            kind = self._data.schema.field(name).type
            own_kind = own.field(name).type if name in own.names else None
            if own_kind != kind and not (own_kind is None and f"/{name}=" in fragment.path):
                raise ConfigError(
                    f"{fragment.path}: column {name}: expected {kind}, as in the first file, got {own_kind}"
                )
        fragment.metadata.write_metadata_file(footer := io.BytesIO())
        digest = hashlib.sha256(footer.getvalue()).hexdigest()[:32]
        size = fragment.filesystem.get_file_info(fragment.path).size
        return FileMark(fragment.path.removeprefix(base).lstrip("/"), size or 0, digest)

    def _pieces_of(self, file: int, fragment: Any) -> list[_Piece]:
        field = self._data.schema.field(self._source.time.field)
        pieces = []
        for group in filter(lambda group: group.num_rows, fragment.row_groups):
            if (known := (group.statistics or {}).get(field.name)) is not None:
                times = _micros(pa.array([known["min"], known["max"]], field.type), self._source.time.unit)
            else:  # the footer does not say it
                table = fragment.subset(row_group_ids=[group.id]).to_table(self._data.schema, columns=[field.name])
                times = self._micros(table)
            times = times[times != _NO_TIME]
            low, high = (int(times.min()), int(times.max())) if len(times) else (_NO_TIME, _NO_TIME)
            pieces.append(_Piece(low, file, group.id, high, group.num_rows, group.total_byte_size, fragment))
        return pieces

    def _read(self, piece: _Piece) -> Any:
        with self._readable():
            group = piece.fragment.subset(row_group_ids=[piece.group])
            return without_views(group.to_table(self._data.schema, columns=self._wanted))

    def _micros(self, table: Any) -> npt.NDArray[np.int64]:
        return _micros(table.column(self._source.time.field), self._source.time.unit)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as exc:
            raise ConfigError(f"source.table: {self._path}: expected readable files: {exc}") from exc


def most_held(pieces: Iterable[tuple[int, int, int]]) -> int:
    """Return how many bytes of pieces (lowest time, highest time, bytes), in the order of their lowest times, are held
    together at most: each until a piece begins after its end.

    >>> most_held([(0, 9, 5), (3, 4, 1), (4, 12, 2), (10, 11, 4)])
    8
    """
    held = most = 0
    ends: list[tuple[int, int]] = []
    for low, high, num_bytes in pieces:
        while ends and ends[0][0] < low:
            held -= heapq.heappop(ends)[1]
        heapq.heappush(ends, (high, num_bytes))
        held += num_bytes
        most = max(most, held)
    return most


def _micros(column: Any, unit: str) -> npt.NDArray[np.int64]:
    """Return times in microseconds since 1970; `_NO_TIME` where there is none."""
    if pa.types.is_timestamp(column.type):
        numbers = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
        return np.asarray(numbers.fill_null(_NO_TIME).to_numpy(), np.int64)
    known = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f":
        known &= np.isfinite(values)
        values = np.round(np.where(known, values, 0.0) * US_PER_UNIT[unit]).astype(np.int64)
    else:
        values = values.astype(np.int64) * US_PER_UNIT[unit]
    return np.where(known, values // 1000 if unit == "ns" else values, _NO_TIME)
