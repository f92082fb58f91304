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
    DigitsSource,
    IdxSource,
    JsonlSource,
    ParquetSource,
    PythonSource,
    SourceSection,
    StdinSource,
    SyntheticSource,
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
class StreamStarts:
    """Where the streams of a source begin, one entry per stream.

    Attributes:
        samples: that the stream holds already.
        positions: samples of the source that the stream was given before; 0 for sources without positions.
        rngs: generators for sources that draw at random, other ones after other `samples`.
    """

    samples: Sequence[int]
    positions: Sequence[int]
    rngs: Sequence[np.random.Generator]

    @property
    def first_places(self) -> list[int]:
        """Where each stream goes on in a file whose sample i is that of stream i mod N."""
        count = len(self.positions)
        return [n + position * count for n, position in enumerate(self.positions)]


@dataclass(frozen=True)
class Stream:
    """One stream of a source of kind python: the first argument of its function.

    Attributes:
        number, count: it is stream `number` of 0 .. count - 1.
        sent: samples that the stream holds already.
        seed: of the job.
        max_record_bytes: a longer record would be refused.
    """

    number: int
    count: int
    sent: int
    seed: int
    max_record_bytes: int

    def rng(self) -> np.random.Generator:
        """The generator of this stream, which draws other numbers after other `sent`."""
        return child_rng(self.seed, SAMPLES, self.number, self.sent)

    def shared_rng(self) -> np.random.Generator:
        """A generator that is the same in all streams and at each start: of what all streams have in common."""
        return child_rng(self.seed, CONCEPT)

    def order_rng(self, number: int) -> np.random.Generator:
        """As `shared_rng`, for the order of pass `number` over a file."""
        return child_rng(self.seed, ORDER, number)


def open_streams(config: JobConfig, starts: Sequence[int], positions: Sequence[int] = ()) -> list[Iterator[bytes]]:
    """One iterator of record values per stream.

    Args:
        starts: samples that each stream holds already. Random sources go on from there with fresh draws, so a producer
            that is started again repeats nothing.
        positions: samples of the file that each stream was given before; it goes on behind them. Empty: none.

    Raises:
        ConfigError: no source, a source that is no set of streams (`stdin`), or a file that is not what was expected.
    """
    source = config.source
    if source is None:
        raise ConfigError("source: expected a section that says what to send (kind: digits, csv, ...), got none")
    if isinstance(source, StdinSource):
        raise ConfigError("source.kind: stdin is one pipe and cannot be opened per stream")
    opener = OPENERS.get(type(source))
    if opener is None:
        known = " or ".join(cls.__name__ for cls in OPENERS)
        raise ConfigError(f"source.kind: expected the opener of {source.kind} in doll.producers.sources, got {known}")
    streams = range(config.data.num_partitions)
    rngs = [child_rng(config.seed, SAMPLES, n, starts[n]) for n in streams]
    return opener(config, source, StreamStarts(starts, positions or [0 for _ in streams], rngs))


def _open_digits(config: JobConfig, source: DigitsSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.producers.sources import digits, images

    stream_part, _ = digits.originals()
    return [images.augmented(*stream_part, rng) for rng in start.rngs]


def _open_lines(config: JobConfig, source: CsvSource | JsonlSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.records import lines

    path, count = config.path(source.path), config.data.num_partitions
    has_header, longest = isinstance(source, CsvSource) and source.header, config.data.max_record_bytes

    def behind(skip: int) -> Iterator[bytes]:
        return lines.read_file(path, header=has_header, repeat=source.repeat, skip=skip, max_bytes=longest)

    # Each stream reads the file for itself: streams of different rates need no buffer between them.
    streams: list[Iterator[bytes]] = [itertools.islice(behind(first), 0, None, count) for first in start.first_places]
    if not (isinstance(source, CsvSource) and source.columns):
        return streams
    from doll.producers.sources import csv_columns

    picked = csv_columns.Picked(path, lines.read_header(path), source.columns, source.delimiter)
    return [
        csv_columns.records(picked, stream, itertools.count(first + 1, count))
        for stream, first in zip(streams, start.first_places, strict=True)
    ]


def _open_parquet(config: JobConfig, source: ParquetSource, start: StreamStarts) -> list[Iterator[bytes]]:
    try:
        from doll.producers.sources import parquet, table_rows
    except ImportError as exc:
        raise lacking("source.kind: parquet", "parquet") from exc
    files = parquet.ParquetFiles(config.path(source.path), source.columns)
    return [
        table_rows.records(files, first, len(start.positions), source.repeat, config.data.max_record_bytes)
        for first in start.first_places
    ]


def _open_dataset(config: JobConfig, source: DatasetSource, start: StreamStarts) -> list[Iterator[bytes]]:
    try:
        from doll.producers.sources import huggingface, table_rows
    except ImportError as exc:
        raise lacking("source.kind: dataset", "datasets") from exc
    rows = huggingface.DatasetRows(config.path(source.path), source.split, source.columns)
    return [
        table_rows.records(rows, first, len(start.positions), source.repeat, config.data.max_record_bytes)
        for first in start.first_places
    ]


def _open_python(config: JobConfig, source: PythonSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.task.base import load_function

    count, longest = len(start.samples), config.data.max_record_bytes
    streams = [Stream(n, count, sent, config.seed, longest) for n, sent in enumerate(start.samples)]
    function = load_function(config, "source", source.of, source.args)
    return [
        itertools.islice(_records_of(source, function(stream)), position, None)
        for stream, position in zip(streams, start.positions, strict=True)
    ]


def _records_of(source: PythonSource, values: Iterable[Any]) -> Iterator[bytes]:
    from doll.task.base import described

    try:
        for value in values:
            if not isinstance(value, bytes | str):
                raise ConfigError(
                    f"source.of: {source.of}: expected records of bytes or text, got {type(value).__name__}"
                )
            yield value.encode() if isinstance(value, str) else value
    except ConfigError:
        raise
    except Exception as exc:  # the user's function may raise anything
        raise ConfigError(f"source.of: {source.of}: {described(exc)}") from exc


def _open_text(config: JobConfig, source: TextSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.task import text

    path, longest, count = config.path(source.path), config.data.max_record_bytes, config.data.num_partitions

    def records_of(stream: int) -> Iterator[bytes]:
        lines = text.read_lines(path, skip=source.skip, max_bytes=longest)
        own = itertools.islice(lines, stream, None, count)
        numbers = itertools.count(stream, count) if source.numbered else None
        return text.records(
            own, source.fields, tokens_per_record=source.tokens_per_record, max_bytes=longest, numbers=numbers
        )

    def stream_of(stream: int) -> Iterator[bytes]:
        first = records_of(stream)
        if not source.repeat:
            return first
        head = next(first, None)
        if head is None:
            raise ConfigError(f"{path}: expected a text for each of {count} streams, got none for stream {stream}")
        again = (records_of(stream) for _ in itertools.count())
        return itertools.chain((head,), first, itertools.chain.from_iterable(again))

    return [itertools.islice(stream_of(n), start.positions[n], None) for n in range(count)]


def _open_synthetic(config: JobConfig, source: SyntheticSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.producers.sources import synthetic

    planes = synthetic.class_planes(source.features, source.classes, child_rng(config.seed, CONCEPT))
    return [
        synthetic.samples(planes, source.drift_per_sample, rng, first)
        for rng, first in zip(start.rngs, start.samples, strict=True)
    ]


def _open_idx(config: JobConfig, source: IdxSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.producers.sources import idx, images

    path = config.path(source.images)
    pixels, labels = idx.read_pair(path, config.path(source.labels))
    if source.skip >= len(pixels):
        raise ConfigError(f"source.skip: expected fewer than the {len(pixels)} images of {path}, got {source.skip}")
    pixels, labels = pixels[source.skip :], labels[source.skip :]
    if source.augment:
        return [images.augmented(pixels, labels, rng) for rng in start.rngs]
    count = len(start.rngs)
    return [images.in_order(pixels[first::count], labels[first::count]) for first in start.first_places]


OPENERS: dict[type[SourceSection], Callable[[JobConfig, Any, StreamStarts], list[Iterator[bytes]]]] = {
    DigitsSource: _open_digits,
    IdxSource: _open_idx,
    CsvSource: _open_lines,
    JsonlSource: _open_lines,
    ParquetSource: _open_parquet,
    DatasetSource: _open_dataset,
    SyntheticSource: _open_synthetic,
    PythonSource: _open_python,
    TextSource: _open_text,
}
"""What opens the streams of each source but `stdin`, by the class of its section. A new source adds its opener here."""
