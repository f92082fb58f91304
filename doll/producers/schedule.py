"""The schedule of a producer: the source's samples, their streams, and the times of the arrival process."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable, Iterator, Sequence

from doll.config import FeedSource, JobConfig, StdinSource
from doll.errors import ConfigError
from doll.producers import arrivals, sources
from doll.producers.feed import Feed
from doll.records.bounded import MalformedError, read_text

ScheduledSample = tuple[float, int, bytes | None]  # arrival time in seconds, stream, sample or None: no sample arrives

_STDIN = 0
_MAX_TRACE_BYTES = 256_000_000


def scheduled_samples(
    config: JobConfig,
    starts: Sequence[int],
    *,
    positions: Sequence[int] = (),
    pipe: int = _STDIN,
    feed: Feed | None = None,
    paused: Callable[[int], bool] = lambda stream: False,
) -> Iterator[ScheduledSample]:
    """Yield the samples of the job's source in the order of their arrival, until the source ends.

    `source.limit_samples` is not applied here.

    Args:
        starts: number of samples that each stream already contains (see `sources.open_streams`).
        positions: number of samples of the job's file that were sent to each stream before; empty: none.
        pipe: file descriptor of standard input.
        feed: connection to the program, if the source is a program.
        paused: function that returns whether a stream is paused now. The next sample of a paused stream arrives after
            the pause. For a Poisson stream, this has the same effect as stopping its clock. Standard input cannot be
            paused.

    Raises:
        ConfigError: the source or the trace of gaps is not valid.
    """
    if isinstance(config.source, StdinSource | FeedSource):
        if len(set(config.rates_per_s())) > 1:
            raise ConfigError(
                f"arrivals.rate_per_s: records of {config.source.kind} go to the streams in turn: expected one rate "
                "for all"
            )
        times = arrivals.merge(arrival_times(config, starts))
        return _from_pipe(config, times, pipe) if feed is None else _in_time(times, feed.records())
    values = sources.open_streams(config, starts, positions)
    return _from_streams(arrivals.merge(arrival_times(config, starts)), values, paused)


def arrival_times(config: JobConfig, starts: Sequence[int]) -> list[Iterator[float]]:
    """Return the arrival process of each stream; each has its own child of the job's seed.

    Raises:
        ConfigError: the trace of gaps cannot be read.
    """
    streams = config.data.num_partitions
    rates = config.rates_per_s()
    match config.arrivals.process:
        case "asap":
            return [arrivals.asap() for _ in range(streams)]
        case "deterministic":
            return [arrivals.deterministic(rate, n / streams) for n, rate in enumerate(rates)]
        case "poisson":
            rngs = [sources.child_rng(config.seed, sources.ARRIVALS, n, starts[n]) for n in range(streams)]
            return [arrivals.poisson(rate, rng) for rate, rng in zip(rates, rngs, strict=True)]
        case "trace":
            assert config.arrivals.trace is not None  # checked when the job file is read
            path = config.path(config.arrivals.trace)
            try:
                text = read_text(path, max_bytes=_MAX_TRACE_BYTES)
            except (OSError, MalformedError) as exc:
                reason = getattr(exc, "strerror", None) or exc
                raise ConfigError(f"arrivals.trace: expected a text file of gaps at {path}: {reason}") from exc
            gaps = arrivals.parse_gaps(text, f"arrivals.trace {path}")
            return [arrivals.trace(gaps, n * len(gaps) // streams) for n in range(streams)]
        case _:
            typing.assert_never(config.arrivals.process)


def _from_streams(
    times: Iterator[tuple[float, int]], values: Sequence[Iterator[bytes]], paused: Callable[[int], bool]
) -> Iterator[ScheduledSample]:
    ended: set[int] = set()
    for time_s, stream in times:
        if paused(stream):
            yield time_s, stream, None
            continue
        value = next(values[stream], None)
        if value is not None:
            yield time_s, stream, value
            continue
        ended.add(stream)
        if len(ended) == len(values):
            return


def _from_pipe(config: JobConfig, times: Iterator[tuple[float, int]], pipe: int) -> Iterator[ScheduledSample]:
    from doll.records import lines

    streams = itertools.cycle(range(config.data.num_partitions))
    waiting = lines.read_pipe(pipe, max_bytes=config.data.max_record_bytes)
    return _in_time(times, (line if line is None else (next(streams), line) for line in waiting))


def _in_time(
    times: Iterator[tuple[float, int]], records: Iterator[tuple[int, bytes] | None]
) -> Iterator[ScheduledSample]:
    """Yield the records (stream, value) at these times, or None if there is no record yet. The streams in `times` are
    ignored."""
    for time_s, stream in times:
        for record in records:
            if record is not None:
                yield time_s, *record
                break
            yield time_s, stream, None
        else:
            return
