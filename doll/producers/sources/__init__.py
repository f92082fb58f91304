"""Sources: iterators of record values (bytes), one per stream, chosen by the job file.

A new source is a section in `doll.config.source`, and its opener in `OPENERS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from doll.config import CsvSource, DigitsSource, IdxSource, JobConfig, JsonlSource, StdinSource, SyntheticSource
from doll.config.source import SourceSection
from doll.errors import ConfigError

# Which child of the job's seed feeds what: another draw can be added without changing these.
ARRIVALS, SAMPLES, CONCEPT = range(3)


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
    workers = range(config.data.workers)
    rngs = [child_rng(config.seed, SAMPLES, n, starts[n]) for n in workers]
    return opener(config, source, StreamStarts(starts, positions or [0 for _ in workers], rngs))


def _open_digits(config: JobConfig, source: DigitsSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.producers.sources import digits, images

    stream_part, _ = digits.originals()
    return [images.augmented(*stream_part, rng) for rng in start.rngs]


def _open_lines(config: JobConfig, source: CsvSource | JsonlSource, start: StreamStarts) -> list[Iterator[bytes]]:
    from doll.producers.sources import lines

    path, count = config.path(source.path), config.data.workers
    header = isinstance(source, CsvSource) and source.header
    longest = config.data.max_record_bytes

    def behind(skip: int) -> Iterator[bytes]:
        return lines.read_file(path, header=header, repeat=source.repeat, skip=skip, max_bytes=longest)

    # Each stream reads the file for itself: streams of different rates need no buffer between them.
    firsts = [n + start.positions[n] * count for n in range(count)]
    return [itertools.islice(behind(first), 0, None, count) for first in firsts]


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
    firsts = [n + start.positions[n] * count for n in range(count)]
    return [images.in_order(pixels[first::count], labels[first::count]) for first in firsts]


OPENERS: dict[type[SourceSection], Callable[[JobConfig, Any, StreamStarts], list[Iterator[bytes]]]] = {
    DigitsSource: _open_digits,
    IdxSource: _open_idx,
    CsvSource: _open_lines,
    JsonlSource: _open_lines,
    SyntheticSource: _open_synthetic,
}
"""What opens the streams of each source but `stdin`, by the class of its section. A new source adds its opener here."""
