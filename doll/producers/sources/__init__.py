"""Sources: iterators of record values (bytes), one per stream. The job file chooses the source.

To add a source, add a section to `doll.config.source` and its opener to `OPENERS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from doll.config import JobConfig
from doll.config.source import (
    CsvSource,
    DatasetSource,
    JsonlSource,
    ParquetSource,
    PythonSource,
    SourceSection,
    StdinSource,
    TextSource,
)
from doll.errors import ConfigError
from doll.extras import lacking
from doll.records.bounded import short

# The children of the job's seed, by purpose; a purpose that is added does not change the others.
ARRIVALS, SAMPLES, CONCEPT, ORDER = range(4)
_SHOWN_CHARS = 200


def child_rng(seed: int, *key: int) -> np.random.Generator:
    """Return the random generator for one purpose. It is independent of generators with another key, and equal in every
    run with the same seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@dataclass(frozen=True)
class Stream:
    """One stream of a source. It is the first argument of the function of a source of kind python.

    Attributes:
        number, count: number of the stream, 0 .. count - 1, and number of streams.
        sent: number of samples that the stream already contains.
        max_record_bytes: maximum size of a record; a larger record is refused.
        position: number of samples of the source that the stream got before; 0 for sources without positions.
    """

    number: int
    count: int
    sent: int
    seed: int
    max_record_bytes: int
    position: int = 0

    @property
    def first_place(self) -> int:
        """The number of the stream's next sample in a file whose sample i belongs to stream i mod N."""
        return self.number + self.position * self.count

    def rng(self) -> np.random.Generator:
        """Return the random generator of this stream. It draws different numbers for different values of `sent`."""
        return child_rng(self.seed, SAMPLES, self.number, self.sent)

    def shared_rng(self) -> np.random.Generator:
        """Return a generator that is equal in all streams and at each start, for draws that all streams share."""
        return child_rng(self.seed, CONCEPT)

    def order_rng(self, number: int) -> np.random.Generator:
        """Return a generator for the order of pass `number` over a file, equal in all streams and at each start."""
        return child_rng(self.seed, ORDER, number)


def open_streams(config: JobConfig, starts: Sequence[int], positions: Sequence[int] = ()) -> list[Iterator[bytes]]:
    """Return one iterator of record values per stream.

    Args:
        starts: number of samples that each stream already contains. Random sources continue after these samples with
            new draws, so a restarted producer repeats no sample.
        positions: number of samples of the file that each stream got before; the stream continues after them. Empty: 0.

    Raises:
        ConfigError: there is no source, the source has no streams of its own (`stdin`), or a file is not valid.
    """
    source, count = config.source, config.data.num_partitions
    if source is None:
        raise ConfigError("source: expected a section that says what to send (kind: python, csv, ...), got none")
    if isinstance(source, StdinSource):
        raise ConfigError("source.kind: stdin is one pipe and cannot be opened per stream")
    opener = OPENERS.get(type(source))
    if opener is None:
        known = " or ".join(cls.__name__ for cls in OPENERS)
        raise ConfigError(f"source.kind: expected the opener of {source.kind} in doll.producers.sources, got {known}")
    return opener(
        config, source,
        [
            Stream(number, count, starts[number], config.seed, config.data.max_record_bytes, position)
            for number, position in enumerate(positions or [0] * count)
        ],
    )  # fmt: skip


def check_names(origin: str, names: Sequence[str], columns: Sequence[str]) -> None:
    """Raise ConfigError if a file with the columns `names` lacks one of `columns`, or has it twice. `columns` empty:
    all columns of the file. `origin`: the file, for the message."""
    if absent := [name for name in columns if name not in names]:
        has = short(", ".join(names), _SHOWN_CHARS)
        raise ConfigError(f"{origin}: has no column {', '.join(absent)} (source.columns); it has {has}")
    if twice := sorted({name for name in columns or names if names.count(name) > 1}):
        raise ConfigError(f"{origin}: names column {', '.join(twice)} twice: which one is meant cannot be told")


def _open_lines(config: JobConfig, source: CsvSource | JsonlSource, streams: Sequence[Stream]) -> list[Iterator[bytes]]:
    from doll.records import lines

    path, has_header = config.path(source.path), isinstance(source, CsvSource) and source.header

    def lines_of(stream: Stream) -> Iterator[bytes]:
        # Each stream reads the file separately, so streams of different rates need no buffer between them.
        following = lines.read_file(
            path, header=has_header, repeat=source.repeat, skip=stream.first_place, max_bytes=stream.max_record_bytes
        )
        return itertools.islice(following, 0, None, stream.count)

    if not (isinstance(source, CsvSource) and source.columns):
        return list(map(lines_of, streams))
    from doll.producers.sources.csv_columns import CsvColumns

    columns = CsvColumns(path, lines.read_header(path), source.columns, source.delimiter)
    return [
        columns.records(lines_of(stream), itertools.count(stream.first_place + 1, stream.count)) for stream in streams
    ]


def _open_rows(
    config: JobConfig, source: ParquetSource | DatasetSource, streams: Sequence[Stream]
) -> list[Iterator[bytes]]:
    is_parquet = isinstance(source, ParquetSource)
    try:
        from doll.producers.sources import table_rows

        if is_parquet:
            from doll.producers.sources.parquet import ParquetFiles
        else:
            from doll.producers.sources.huggingface import DatasetRows
    except ImportError as exc:
        raise lacking(f"source.kind: {source.kind}", "parquet" if is_parquet else "datasets") from exc
    path = config.path(source.path)
    rows: table_rows.TableRows = (
        DatasetRows(path, source.split, source.columns)
        if isinstance(source, DatasetSource)
        else ParquetFiles(path, source.columns)
    )
    return [
        table_rows.records(rows, stream.first_place, stream.count, source.repeat, stream.max_record_bytes)
        for stream in streams
    ]


def _open_python(config: JobConfig, source: PythonSource, streams: Sequence[Stream]) -> list[Iterator[bytes]]:
    from doll.task.base import load_function

    function = load_function(config, "source", source.of, source.args)
    return [itertools.islice(_records_of(source, function(stream)), stream.position, None) for stream in streams]


def _records_of(source: PythonSource, values: Iterable[Any]) -> Iterator[bytes]:
    from doll.task.base import user_code

    with user_code(f"source.of: {source.of}"):
        for value in values:
            if not isinstance(value, bytes | str):
                raise ConfigError(
                    f"source.of: {source.of}: expected records of bytes or text, got {type(value).__name__}"
                )
            yield value.encode() if isinstance(value, str) else value


def _open_text(config: JobConfig, source: TextSource, streams: Sequence[Stream]) -> list[Iterator[bytes]]:
    from doll.task import text

    path = config.path(source.path)

    def records_of(stream: Stream) -> Iterator[bytes]:
        lines = text.read_lines(path, skip=source.skip, max_bytes=stream.max_record_bytes)
        return text.records(
            itertools.islice(lines, stream.number, None, stream.count),
            source.fields,
            tokens_per_record=source.tokens_per_record,
            max_bytes=stream.max_record_bytes,
            numbers=itertools.count(stream.number, stream.count) if source.numbered else None,
        )

    def repeated(stream: Stream) -> Iterator[bytes]:
        first = records_of(stream)
        head = next(first, None)
        if head is None:
            raise ConfigError(
                f"{path}: expected a text for each of {stream.count} streams, got none for stream {stream.number}"
            )
        again = (records_of(stream) for _ in itertools.count())
        return itertools.chain((head,), first, itertools.chain.from_iterable(again))

    open_one = repeated if source.repeat else records_of
    return [itertools.islice(open_one(stream), stream.position, None) for stream in streams]


OPENERS: dict[type[SourceSection], Callable[[JobConfig, Any, Sequence[Stream]], list[Iterator[bytes]]]] = {
    CsvSource: _open_lines,
    JsonlSource: _open_lines,
    ParquetSource: _open_rows,
    DatasetSource: _open_rows,
    PythonSource: _open_python,
    TextSource: _open_text,
}
"""The openers of the streams of each source but `stdin`, by the class of its section."""
