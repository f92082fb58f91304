"""The records that the join of a job refused, from its journal, for people. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.records.join_log import FEATURES, MAX_PAYLOAD_BYTES, RefusedRecord, decode_step

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.config.join import JoinConfig
    from doll.ledger.dead_letters import Selection
    from doll.services import Services


@dataclass(frozen=True)
class JoinRefusal:
    """A record of a joined topic that is in no sample. `time_s`: Unix time when a joiner refused it."""

    topic: str
    record: RefusedRecord
    time_s: float

    @property
    def at(self) -> tuple[int, int]:
        """The partition and the offset of the record."""
        return self.record.partition, self.record.offset

    @property
    def event_time_s(self) -> float | None:
        """The event time of the record; None if it could not be read."""
        return None if self.record.time_ms < 0 else self.record.time_ms / 1000

    @property
    def is_cut(self) -> bool:
        """Whether only the first bytes of the value are known."""
        return len(self.record.value) >= MAX_PAYLOAD_BYTES

    @property
    def payload(self) -> bytes:
        """The value of the record as far as it is known; of a label whose event time is known: only the label."""
        value = self.record.value
        if self.record.source != FEATURES or self.record.time_ms < 0 or self.is_cut:
            return value
        return value.removesuffix(b",") + b"}"  # the join log has features without their last brace


def join_refusals(config: JobConfig, services: Services, join: JoinConfig, selection: Selection) -> list[JoinRefusal]:
    """Return the selected records of any joined topic that the join has refused, in the order of topics, partitions and
    offsets.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or does not have the job's topics.
        RecordError: a record of the journal cannot be read.
    """
    topics.check(config, services)
    journal = config.topic("joins")
    refusals = []
    with RangeReader(config, services) as reader:
        for partition in range(config.data.num_partitions):
            for _, value in reader.read(journal, partition, *reader.bounds(journal, partition)):
                step = decode_step(value)
                refusals += [JoinRefusal(join.topics[item.source], item, step.now_ms / 1000) for item in step.refused]
    selected = [item for item in refusals if selection.takes(item.record.reason, item.record.code, item.at)]
    return sorted(selected, key=lambda item: (item.record.source, *item.at))
