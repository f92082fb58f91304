"""The loop of a process that follows topics of a job: polls, probes, and the end by a signal."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, NamedTuple

from doll.config import JobConfig
from doll.kafka.reader import Partition, Tail, TimedRecord
from doll.process.health import BEAT_TIMEOUT_S, Heartbeat, heartbeat_of
from doll.process.signals import stop_requested
from doll.services import Services

_POLL_S: Final = 0.5
_CHECK_KAFKA_EVERY_S: Final = 10.0
Page = Callable[[], tuple[str, bytes]]  # returns content type and content


class Poll(NamedTuple):
    """The next records, maybe none.

    Attributes:
        has_read_history: all records that the topics held at the beginning are in this or in an earlier poll.
        heartbeat: call `beat("loop")` if the work for a record may take seconds.
    """

    entries: Sequence[TimedRecord]
    has_read_history: bool
    ends: Mapping[Partition, int]
    heartbeat: Heartbeat

    def is_new(self, entry: TimedRecord) -> bool:
        """Return whether the record came after the beginning, and the whole history is read."""
        return self.has_read_history and entry.offset >= self.ends[Partition(entry.topic, 0)]


def follow(
    config: JobConfig, services: Services, process: str, topics: Sequence[str], *,
    pages: Mapping[str, Page] | None = None, default_port: int | None = None, loop_s: float = BEAT_TIMEOUT_S,
) -> Generator[Poll, None, None]:  # fmt: skip
    """Yield the records of topics (full names, one partition each), from the earliest kept one, until SIGTERM or
    SIGINT. Close the generator if it is not used up. Raise ServiceUnavailableError if Kafka does not answer at the
    start.

    Args:
        process: name of this process, for its health probe.
        pages, default_port: see `doll.process.health`.
        loop_s: maximum number of seconds between two beats of "loop".
    """
    with (
        stop_requested() as stop,
        heartbeat_of(process, config, default_port=default_port) as heartbeat,
        Tail(config, services, topics) as tail,
    ):
        heartbeat.pages.update(pages or {})
        heartbeat.expect("loop", within_s=loop_s)
        heartbeat.expect("kafka", within_s=3 * _CHECK_KAFKA_EVERY_S, vital=False)
        heartbeat.set_waiting_for("the history of the job")
        is_read = False
        while not stop.is_set():
            heartbeat.beat("loop")
            entries = tail.poll(_POLL_S)
            if not is_read and all(map(tail.has_read_history, tail.ends)):
                is_read = True
                heartbeat.set_waiting_for("")
            yield Poll(entries, is_read, tail.ends, heartbeat)
            if entries or tail.partition_ends(topics[0], 1) is not None:
                heartbeat.beat("kafka")
