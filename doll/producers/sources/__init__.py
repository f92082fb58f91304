"""Sources: iterators of record values (bytes), one per stream, chosen by the job file.

A new source is a section in `doll.config.source`, and its opener in `OPENERS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from doll.config import JobConfig
from doll.config.source import (
    CriteoSource,
    CsvSource,
    DatasetSource,
    DigitsSource,
    IdxSource,
    JsonlSource,
    ParquetSource,
    RatingsSource,
    SourceSection,
    StdinSource,
    SyntheticClicksSource,
    SyntheticRatingsSource,
    SyntheticSource,
    TextSource,
)
from doll.errors import ConfigError

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


def _open_lines(
    config: JobConfig, source: CsvSource | JsonlSource | CriteoSource, start: StreamStarts
) -> list[Iterator[bytes]]:
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
        raise _lacks_extra(source.kind, "pyarrow", "parquet") from exc
    files = parquet.ParquetFiles(config.path(source.path), source.columns)
    return [
        table_rows.records(files, first, len(start.positions), source.repeat, config.data.max_record_bytes)
        for first in start.first_places
    ]


def _open_dataset(config: JobConfig, source: DatasetSource, start: StreamStarts) -> list[Iterator[bytes]]:
    try:
        from doll.producers.sources import huggingface, table_rows
    except ImportError as exc:
        raise _lacks_extra(source.kind, "datasets", "datasets") from exc
    rows = huggingface.DatasetRows(config.path(source.path), source.split, source.columns)
    return [
        table_rows.records(rows, first, len(start.positions), source.repeat, config.data.max_record_bytes)
        for first in start.first_places
    ]


def _lacks_extra(kind: str, package: str, extra: str) -> ConfigError:
    return ConfigError(f"source.kind: {kind} needs the package {package} (pip install 'doll-online[{extra}]')")


def _open_criteo(config: JobConfig, source: CriteoSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.producers.sources import criteo

    return [criteo.records(lines_of_stream) for lines_of_stream in _open_lines(config, source, start)]


def _open_synthetic_clicks(
    config: JobConfig, source: SyntheticClicksSource, start: StreamStarts
) -> list[Iterator[bytes]]:
    from doll.producers.sources import synthetic_clicks

    rng = child_rng(config.seed, CONCEPT)
    truth = synthetic_clicks.draw_truth(source.categories, source.zipf, source.density, rng)
    return [synthetic_clicks.samples(truth, rng) for rng in start.rngs]


def _open_ratings(config: JobConfig, source: RatingsSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.producers.sources import ratings
    from doll.records import lines

    path, count = config.path(source.path), config.data.num_partitions

    def rated(repeat: bool) -> Iterator[bytes]:
        read = lines.read_file(path, header=source.header, repeat=repeat, max_bytes=config.data.max_record_bytes)
        return ratings.records(read, source.holdout_one_in)

    if not source.shuffle:
        return [itertools.islice(rated(source.repeat), first, None, count) for first in start.first_places]
    values = list(rated(repeat=False))
    if not values:
        raise ConfigError(f"source.holdout_one_in: expected ratings of {path} that are not held out, got none")
    return [
        ratings.shuffled(
            values, first, count, lambda number: child_rng(config.seed, ORDER, number), repeat=source.repeat
        )
        for first in start.first_places
    ]


def _open_synthetic_ratings(
    config: JobConfig, source: SyntheticRatingsSource, start: StreamStarts
) -> list[Iterator[bytes]]:
    from doll.producers.sources import ratings

    rng, streams = child_rng(config.seed, CONCEPT), config.data.num_partitions
    observed = ratings.observe(source.users, source.items, source.rank, source.noise, source.observed, rng)
    return [ratings.samples(observed, n, streams, rng) for n, rng in enumerate(start.rngs)]


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
    CriteoSource: _open_criteo,
    SyntheticClicksSource: _open_synthetic_clicks,
    RatingsSource: _open_ratings,
    SyntheticRatingsSource: _open_synthetic_ratings,
    SyntheticSource: _open_synthetic,
    TextSource: _open_text,
}
"""What opens the streams of each source but `stdin`, by the class of its section. A new source adds its opener here."""
