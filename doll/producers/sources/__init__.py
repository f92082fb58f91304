"""Sources: iterators of record values (bytes), one per stream, chosen by the job file."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator, Sequence

import numpy as np

from doll.config import CsvSource, DigitsSource, IdxSource, JobConfig, JsonlSource, StdinSource, SyntheticSource
from doll.errors import ConfigError

# Which child of the job's seed feeds what: another draw can be added without changing these.
ARRIVALS, SAMPLES, CONCEPT = range(3)


def child_rng(seed: int, *key: int) -> np.random.Generator:
    """The generator of one purpose: independent of those with another key, equal in every run of one seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


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
    workers = range(config.data.workers)
    positions = positions or [0 for _ in workers]
    rngs = [child_rng(config.seed, SAMPLES, n, starts[n]) for n in workers]
    match source:
        case None:
            raise ConfigError("source: expected a section that says what to send (kind: digits, csv, ...), got none")
        case StdinSource():
            raise ConfigError("source.kind: stdin is one pipe and cannot be opened per stream")
        case DigitsSource():
            from doll.producers.sources import digits, images

            stream_part, _ = digits.originals()
            return [images.augmented(*stream_part, rngs[n]) for n in workers]
        case IdxSource():
            return _idx_streams(config, source, rngs, positions)
        case CsvSource() | JsonlSource():
            from doll.producers.sources import lines

            path = config.path(source.path)
            header = isinstance(source, CsvSource) and source.header
            longest = config.data.max_record_bytes

            def behind(skip: int) -> Iterator[bytes]:
                return lines.read_file(path, header=header, repeat=source.repeat, skip=skip, max_bytes=longest)

            # Each stream reads the file for itself: streams of different rates need no buffer between them.
            firsts = [n + positions[n] * len(workers) for n in workers]
            return [itertools.islice(behind(first), 0, None, len(workers)) for first in firsts]
        case SyntheticSource():
            from doll.producers.sources import synthetic

            planes = synthetic.class_planes(source.features, source.classes, child_rng(config.seed, CONCEPT))
            return [synthetic.samples(planes, source.drift_per_sample, rngs[n], starts[n]) for n in workers]
        case _:
            typing.assert_never(source)


def _idx_streams(
    config: JobConfig, source: IdxSource, rngs: Sequence[np.random.Generator], positions: Sequence[int]
) -> list[Iterator[bytes]]:
    from doll.producers.sources import idx, images

    path = config.path(source.images)
    pixels, labels = idx.read_pair(path, config.path(source.labels))
    if source.skip >= len(pixels):
        raise ConfigError(f"source.skip: expected fewer than the {len(pixels)} images of {path}, got {source.skip}")
    pixels, labels = pixels[source.skip :], labels[source.skip :]
    if source.augment:
        return [images.augmented(pixels, labels, rng) for rng in rngs]
    count = len(rngs)
    firsts = [n + positions[n] * count for n in range(count)]
    return [images.in_order(pixels[first::count], labels[first::count]) for first in firsts]
