"""The held-out samples of another topic (`evaluation.holdout.topic`)."""

from __future__ import annotations

from doll import telemetry
from doll.config import JobConfig
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.services import Services
from doll.task.base import Task
from doll.task.batches import SampleBatch

log = telemetry.get_logger(__name__)


def topic_samples(config: JobConfig, services: Services, topic: str, task: Task) -> SampleBatch:
    """Return the samples of the last `evaluation.max_samples` records of a topic, in equal parts of its partitions.
    Records that would be dead letters in the job's own topic are counted in a warning. Raise ConfigError if there is no
    such topic, or no record of it can be decoded. Raise ServiceUnavailableError if Kafka does not answer."""
    with RangeReader(config, services) as reader:
        if not (count := reader.num_partitions(topic)):
            raise ConfigError(f"evaluation.holdout.topic: expected an existing topic, got {topic}")
        most = -(-config.evaluation.max_samples // count)
        messages = [
            message
            for partition, (low, high) in reader.bounds_of_partitions(topic, range(count)).items()
            for message in reader.client_messages(topic, partition, max(low, high - most), high)
        ]
    # The task sees numbers of its own as offsets: the records are of several partitions.
    values, envelopes = [message.value() for message in messages], messages if task.reads_envelopes else ()
    decoded = decode_records(
        task, RawRecords(range(len(values)), values, 0, envelopes), samples_per_record=1,
        max_record_bytes=config.data.max_record_bytes, skip_tombstones=config.data.tombstones == "skip",
    )  # fmt: skip
    log.info("held_out_topic_read", topic=topic, records=len(values), samples=decoded.num_samples)
    if decoded.refused:
        problem = f"{len(decoded.refused)} of {len(values)} records cannot be decoded: {decoded.refused[0].reason}"
        if not decoded.num_samples:
            raise ConfigError(f"evaluation.holdout.topic: {problem}")
        log.warning("held_out_records_refused", reason=problem)
    return decoded.samples
