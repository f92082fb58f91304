"""Rows of a table of history, merged in the order of their event time: Parquet files, or a Delta table.

Each format opens as a data set of Arrow. A row group of a file is a piece. The pieces are read in the order of their
lowest times, so that only pieces whose times overlap are in memory together. The order of the rows depends only on the
files; rows of the same time keep the order of their files.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import posixpath
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from doll.errors import ConfigError
from doll.extras import lacking
from doll.producers.handover import FileMark, identity
from doll.producers.sources.table_rows import Unreadable, check_columns, values_of

if TYPE_CHECKING:
    from doll.config.source import HistorySource

NO_TIME: Final = np.iinfo(np.int64).min  # of a row without a time: it comes before the others of its piece
_US_PER_UNIT: Final = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}
_AT_ONCE: Final = 16  # files whose footers are read together
Micros = npt.NDArray[np.int64]


class _Piece(NamedTuple):
    low_us: int
    file: int
    group: int
    high_us: int
    rows: int
    num_bytes: int
    fragment: Any


def open_parquet(path: str, files: Collection[str]) -> tuple[Any, str, int]:
    """Return the data set of the Parquet files below a folder or URL, or of `files` of them; its folder; and 0."""
    system, base = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    if system.get_file_info(base).type == fs.FileType.File:
        base, name = posixpath.split(base)
        files = files or [name]
    found = files or sorted(
        name
        for info in system.get_file_info(fs.FileSelector(base, recursive=True))
        if info.is_file and (name := info.path.removeprefix(base).lstrip("/")).endswith(".parquet")
        and not any(part[0] in "._" for part in name.split("/"))
    )  # fmt: skip
    if not found:
        raise ConfigError(f"source.table: {path}: expected files *.parquet in the folder, got none")
    layout = ds.partitioning(flavor="hive")
    names = [posixpath.join(base, name) for name in found]
    data = ds.dataset(names, filesystem=system, format="parquet", partitioning=layout, partition_base_dir=base)
    return data, base, 0


def open_delta(path: str, version: int | None) -> tuple[Any, str, int]:
    """Return the data set of a version of a Delta table, the newest one without `version`; its folder; the version."""
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as exc:
        raise lacking("source.format: delta", "delta") from exc
    try:
        table = DeltaTable(path, version=version)
        return table.to_pyarrow_dataset(), "", table.version()
    except DeltaError as exc:
        raise ConfigError(f"source.table: {path}: expected a readable Delta table: {exc}") from exc


class HistoryTable:
    """The table of a job's history.

    Attributes:
        files: the files, each with its size and the digest of its footer.
        version: the version of the Delta table; 0 for Parquet files.
        rows: number of rows.
        end_us: the latest event time, microseconds since 1970.
    """

    def __init__(self, source: HistorySource, path: str, files: Collection[str] = (), version: int | None = None):
        """
        Args:
            path: absolute path of the table, or its URL.
            files: the files to read, if they are known; empty: all.

        Raises:
            ConfigError: a file cannot be read or lacks a column, the table has no rows, or more of it overlaps in time
                than the memory holds.
        """
        self._source, self._path = source, path
        with self._readable():
            opened = open_delta(path, version) if source.format == "delta" else open_parquet(path, files)
            self._data, base, self.version = opened
        handover = source.handover
        given = [source.value] if source.value else source.columns or self._data.schema.names
        self.columns = list(given)
        keys = [name for name in (source.time.field, handover.partition, handover.offset, handover.key) if name]
        self._wanted = list(dict.fromkeys([*self.columns, *keys]))
        check_columns(path, self._data.schema, self._wanted)
        self._check_types()
        with self._readable(), ThreadPoolExecutor(_AT_ONCE) as pool:
            fragments = list(self._data.get_fragments())
            self.files = tuple(pool.map(lambda fragment: self._mark(fragment, base), fragments))
            pieces = pool.map(self._pieces_of, range(len(fragments)), fragments)
            self._pieces = sorted(piece for of_file in pieces for piece in of_file)
        self.rows = sum(piece.rows for piece in self._pieces)
        self.end_us = max((piece.high_us for piece in self._pieces), default=NO_TIME)
        if self.end_us == NO_TIME:
            raise ConfigError(f"source.table: {path}: expected at least one row with a time, got {self.rows} rows")
        most = most_held((piece.low_us, piece.high_us, piece.num_bytes) for piece in self._pieces)
        if most > source.memory_bytes:
            raise ConfigError(
                f"source.table: {path}: row groups of {most} bytes have overlapping times and are needed in memory "
                f"together, and source.memory_bytes is {source.memory_bytes}: write files that are sorted by "
                f"{source.time.field} and have smaller row groups, or raise it"
            )

    def chunks(self, piece: int, base: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the rows in order from piece number `piece` on, as tables: the number of the piece with which the rows
        are complete, the number of the first row, and the rows. `base` is the number of the first row of `piece`."""
        since = self._pieces[piece].low_us
        before = [item for item in self._pieces[:piece] if item.high_us >= since]
        held = [table.filter(pa.array(self._micros(table) >= since)) for table in map(self._read, before)]
        for number in range(piece, len(self._pieces)):
            table = pa.concat_tables([*held, self._read(self._pieces[number])])
            times = self._micros(table)
            held = []
            if number + 1 < len(self._pieces):
                is_due = times < self._pieces[number + 1].low_us
                if not is_due.all():
                    held = [table.filter(pa.array(~is_due))]
                    table, times = table.filter(pa.array(is_due)), times[is_due]
            if (np.diff(times) < 0).any():
                table = table.take(pa.array(np.argsort(times, kind="stable")))
            yield number, base, table
            base += len(table)

    def last_offsets(self) -> dict[int, tuple[int, int, int]]:
        """Return the first and the last offset, and the number of rows, of each partition of the topic in the table.

        Raises:
            ConfigError: a row has no partition or offset.
        """
        found: dict[int, tuple[int, int, int]] = {}
        handover = self._source.handover
        with self._readable():
            for batch in self._data.to_batches(columns=[str(handover.partition), str(handover.offset)]):
                if any(column.null_count for column in batch.columns):
                    raise ConfigError(f"source.handover: {self._path}: expected partition and offset in each row")
                partitions, offsets = (column.cast(pa.int64()).to_numpy() for column in batch.columns)
                for partition in np.unique(partitions).tolist():
                    own = offsets[partitions == partition]
                    first, last, count = found.get(partition, (int(own[0]), -1, 0))
                    found[partition] = min(first, int(own.min())), max(last, int(own.max())), count + len(own)
        return found

    def identities(self, since_us: int) -> Iterator[int]:
        """Yield the identity of each row of this time or later."""
        handover = self._source.handover
        for piece in self._pieces:
            if piece.high_us >= since_us:
                table = self._read(piece)
                times = self._micros(table)
                keys = table.column(handover.key).to_pylist()
                yield from (identity(key, at) for key, at in zip(keys, times.tolist(), strict=True) if at >= since_us)

    def places(self, table: Any) -> list[tuple[int, int]] | None:
        """Return the partition and the offset of each row in the topic; None: the table does not have them."""
        handover = self._source.handover
        if handover.partition is None:
            return None
        columns = table.column(handover.partition), table.column(handover.offset)
        return list(zip(*(column.to_pylist() for column in columns), strict=True))

    def values(self, table: Any, max_bytes: int) -> Iterator[bytes | None]:
        """Yield the record of each row, cut to `max_bytes`. Of a row without a form in JSON, it is the reason, which a
        worker refuses."""
        if self._source.value is not None:
            for value in table.column(self._source.value).to_pylist():
                encoded = value.encode() if isinstance(value, str) else value
                yield None if encoded is None else encoded[:max_bytes]
            return
        for record in values_of(table.select(self.columns)):
            if isinstance(record, Unreadable):
                record = f"{self._path}, column {record.column}: {record.reason}".encode()
            yield record[:max_bytes]

    def _check_types(self) -> None:
        schema, handover, time = self._data.schema, self._source.handover, self._source.time
        assert time.field is not None
        kind = schema.field(time.field).type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not pa.types.is_timestamp(kind) and (not is_number or time.unit == "iso8601"):
            raise ConfigError(
                f"source.time: column {time.field} of {self._path} is {kind}: expected a timestamp, or a number with "
                "the unit s, ms, us or ns"
            )
        for name in filter(None, (handover.partition, handover.offset)):
            if not pa.types.is_integer(schema.field(name).type):
                raise ConfigError(f"source.handover: column {name} is {schema.field(name).type}: expected integers")
        is_text = pa.types.is_string(of := schema.field(self._source.value or time.field).type)
        if self._source.value and not (is_text or pa.types.is_binary(of)):
            raise ConfigError(f"source.value: column {self._source.value}: expected bytes or text, got {of}")
        if handover.key and not (pa.types.is_string(of := schema.field(handover.key).type) or pa.types.is_integer(of)):
            raise ConfigError(f"source.handover.key: column {handover.key} is {of}: expected texts or integers")

    def _mark(self, fragment: Any, base: str) -> FileMark:
        fragment.ensure_complete_metadata()
        own = fragment.physical_schema
        for name in self._wanted if self._source.format == "parquet" else ():
            kind = self._data.schema.field(name).type
            found = own.field(name).type if name in own.names else None
            if found != kind and not (found is None and f"/{name}=" in fragment.path):
                raise ConfigError(f"{fragment.path}: column {name}: expected {kind}, as in the first file, got {found}")
        footer = io.BytesIO()
        fragment.metadata.write_metadata_file(footer)
        digest = hashlib.sha256(footer.getvalue()).hexdigest()[:32]
        size = fragment.filesystem.get_file_info(fragment.path).size
        return FileMark(fragment.path.removeprefix(base).lstrip("/"), size or 0, digest)

    def _pieces_of(self, file: int, fragment: Any) -> list[_Piece]:
        field = self._data.schema.field(self._source.time.field)
        pieces = []
        for group in fragment.row_groups:
            known = (group.statistics or {}).get(field.name)
            if known is None:  # the footer does not say it
                table = fragment.subset(row_group_ids=[group.id]).to_table(self._data.schema, columns=[field.name])
                times = self._micros(table)
                times = times[times != NO_TIME]
            else:
                times = _micros(pa.array([known["min"], known["max"]], field.type), self._source.time.unit)
            low, high = (int(times.min()), int(times.max())) if len(times) else (NO_TIME, NO_TIME)
            if group.num_rows:
                pieces.append(_Piece(low, file, group.id, high, group.num_rows, group.total_byte_size, fragment))
        return pieces

    def _read(self, piece: _Piece) -> Any:
        with self._readable():
            return piece.fragment.subset(row_group_ids=[piece.group]).to_table(self._data.schema, columns=self._wanted)

    def _micros(self, table: Any) -> Micros:
        return _micros(table.column(self._source.time.field), self._source.time.unit)

    def _readable(self) -> _Readable:
        return _Readable(self._path)


class _Readable:
    """A context that raises ConfigError instead of the errors of Arrow and of files."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        if isinstance(exc, pa.ArrowException | OSError):
            raise ConfigError(f"source.table: {self._path}: expected readable files: {exc}") from exc


def most_held(pieces: Iterable[tuple[int, int, int]]) -> int:
    """Return how many bytes of pieces are held together at most. The pieces (lowest time, highest time, bytes) come in
    the order of their lowest times; one is held until a piece begins after its end.

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


def _micros(column: Any, unit: str) -> Micros:
    """Return times in microseconds since 1970; `NO_TIME` where there is none."""
    if pa.types.is_timestamp(column.type):
        numbers = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
        return np.asarray(numbers.fill_null(NO_TIME).to_numpy(), np.int64)
    values = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    factor = _US_PER_UNIT[unit]
    if values.dtype.kind == "f":  # also integers of which some are null
        known = np.isfinite(values)
        scaled = np.round(np.where(known, values, 0.0) * factor).astype(np.int64)
    else:
        known, scaled = np.ones(len(values), bool), values.astype(np.int64) * factor
    return np.where(known, scaled // 1000 if unit == "ns" else scaled, NO_TIME)
