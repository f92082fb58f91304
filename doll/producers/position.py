"""The position at which a file source continues when its producer restarts. The records of a stream carry it.

Offsets do not give this position: other producers, replayed dead letters and transaction markers also take offsets, and
retention deletes records. Each record of a file therefore has a header `doll-position: <source> <next>`: the name of
the source, and the position after the record's last sample in the stream's part of the file. Kafka keeps the records of
a producer in one partition in order and without gaps, so the last header in a partition shows which samples of its
stream have arrived. Only headers after the origin of the newest generation count, because a new generation has not
read earlier records.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Final

from doll.config import JobConfig
from doll.config.source import SourceConfig
from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.ledger.admission import read_lineage
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

HEADER: Final = "doll-position"
_VALUE: Final = re.compile(rb"([0-9a-f]{16}) ([0-9]{1,18})")
_FIRST_WINDOW: Final = 64  # records before the end of a partition; each further window is eight times as large


def source_name(source: SourceConfig | None) -> str:
    """Return the name of a source that is read in order from a file; "" for random sources, and for standard input."""
    identity = None if source is None else source.position_identity()
    return "" if identity is None else hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def position_headers(name: str, position: int) -> list[tuple[str, bytes]]:
    """Return the headers of a record after which its stream continues at `position`; without a name, no headers."""
    return [(HEADER, f"{name} {position}".encode())] if name else []


def position_in(name: str, headers: Sequence[tuple[str, bytes | None]]) -> int | None:
    """Return the position of this source in a record's headers; None if the headers do not have one."""
    for key, value in headers:
        match = _VALUE.fullmatch(value or b"") if key == HEADER else None
        if match is not None and match[1].decode() == name:
            return int(match[2])
    return None


def find_positions(config: JobConfig, services: Services) -> list[int]:
    """Return, per stream, how many samples of the job's file are in its partition. All are 0 for other sources.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
        ConfigError: records of the stream were deleted, and the last position with them.
    """
    name, repeats = source_name(config.source), bool(getattr(config.source, "repeat", False))
    streams = range(config.data.num_partitions)
    if not name:
        return [0 for _ in streams]
    origins = read_lineage(config, services).origins
    if len(origins) < config.data.num_partitions:  # no parameter server serves the job yet
        origins = tuple(0 for _ in streams)
    topic = config.topic("samples")
    with RangeReader(config, services) as reader:
        positions = [_newest_position(reader, topic, stream, origins[stream], name, repeats) for stream in streams]
    if any(positions):
        log.info("file_resumed", positions=positions)
    return positions


def _newest_position(reader: RangeReader, topic: str, stream: int, origin: int, name: str, repeats: bool) -> int:
    """Return the newest position in one partition; search from its end."""
    low, high = reader.bounds(topic, stream)
    first = max(low, origin)
    until, width = high, _FIRST_WINDOW
    while until > first:
        since = max(first, until - width)
        newest = None
        for message in reader.messages(topic, stream, since, until):
            position = position_in(name, message.headers)
            newest = newest if position is None else position
        if newest is not None:
            return newest
        until, width = since, 8 * width
    if low > origin and not repeats:
        raise ConfigError(
            f"{topic}/{stream}: the records {origin} to {low - 1} are deleted (retention), and no later one says how "
            "far the file was sent: expected a record of it; send the rest of the file as another source (a file that "
            "begins where it should continue), or choose another job name"
        )
    return 0
