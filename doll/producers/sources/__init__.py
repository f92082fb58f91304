"""Sources: iterators of record values (bytes), one per stream, chosen by the job file.

A new source is a section in `doll.config.source`, and its opener in `OPENERS`.
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

# Which child of the job's seed feeds what: another draw can be added without changing these.
ARRIVALS, SAMPLES, CONCEPT, ORDER = range(4)


def child_rng(seed: int, *key: int) -> np.random.Generator:
    """The generator of one purpose: independent of those with another key, equal in every run of one seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@dataclass(frozen=True)
class Stream:
    """One stream of a source; the first argument of the function of a source of kind python.

    Attributes:
        number, count: it is stream `number` of 0 .. count - 1.
        sent: samples that the stream holds already.
        seed: of the job.
        max_record_bytes: a longer record would be refused.
        position: samples of the source that the stream was given before; 0 for sources without positions.
    """

    number: int
    count: int
    sent: int
    seed: int
    max_record_bytes: int
    position: int = 0

    @property
    def first_place(self) -> int:
        """The place where the stream goes on in a file whose sample i is that of stream i mod N."""
        return self.number + self.position * self.count

    def rng(self) -> np.random.Generator:
        """The generator of this stream, which draws other numbers after other `sent`."""
        return child_rng(self.seed, SAMPLES, self.number, self.sent)

    def shared_rng(self) -> np.random.Generator:
        """A generator that is the same in all streams and at each start: of what all streams have in common."""
        return child_rng(self.seed, CONCEPT)

    def order_rng(self, number: int) -> np.random.Generator:
        """A generator that is shared as `shared_rng` is, for the order of pass `number` over a file."""
        return child_rng(self.seed, ORDER, number)


def open_streams(config: JobConfig, starts: Sequence[int], positions: Sequence[int] = ()) -> list[Iterator[bytes]]:
    """One iterator of record values per stream.

    Args:
        starts: samples that each stream holds already. Random sources go on from there with fresh draws, so a producer
            that is started again repeats nothing.
        positions: samples of the file that each stream was given before; it goes on after them. Empty: none.

    Raises:
        ConfigError: no source, a source that is no set of streams (`stdin`), or a file that is not what was expected.
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


def _open_lines(config: JobConfig, source: CsvSource | JsonlSource, streams: Sequence[Stream]) -> list[Iterator[bytes]]:
    from doll.records import lines

    path, has_header = config.path(source.path), isinstance(source, CsvSource) and source.header

    def lines_of(stream: Stream) -> Iterator[bytes]:
        # Each stream reads the file for itself: streams of different rates need no buffer between them.
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
