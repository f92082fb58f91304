"""The end of a source, told to the parameter server again: the one that its producer told may have been lost since."""

from __future__ import annotations

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.publisher import Publisher
from doll.records.control import SourceEnded
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_FLUSH_S = 5.0


def report_end(config: JobConfig, services: Services) -> None:
    """The source has ended where the partitions end now. Where Kafka does not answer, nothing is told."""
    name = config.topic("samples")
    try:
        ends = [info.high for info in topics.describe(config, services) if info.name == name]
        with Publisher(config, services) as publisher:
            for end in ends:
                publisher.send(config.topic("events"), SourceEnded(ends=end))
            publisher.flush(_FLUSH_S)
    except ServiceUnavailableError as exc:
        log.warning("end_not_reported", reason=str(exc))
