"""The held-out samples of another topic (`evaluation.holdout.topic`)."""

from __future__ import annotations

from doll import telemetry
from doll.config import JobConfig
from doll.consumers.intake.decoding import RawRecords, SeenForms, decode_records
from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.records.bounded import short
from doll.services import Services
from doll.task.base import Task
from doll.task.batches import SampleBatch, batch_of, joined

log = telemetry.get_logger(__name__)


def topic_samples(config: JobConfig, services: Services, topic: str, task: Task) -> SampleBatch:
    """Return the samples of the last `evaluation.max_samples` records of a topic, in equal parts of its partitions.
    Records that would be dead letters in the job's own topic are counted in a warning.

    Raises:
        ConfigError: there is no such topic, or no record of it can be decoded.
        ServiceUnavailableError: Kafka does not answer.
    """
    parts, seen = list[SampleBatch](), SeenForms(task)
    num_records = num_refused = 0
    reason = ""
    with RangeReader(config, services) as reader:
        if not (count := reader.num_partitions(topic)):
            raise ConfigError(f"evaluation.holdout.topic: expected an existing topic, got {topic}")
        most = -(-config.evaluation.max_samples // count)
        for partition, (low, high) in reader.bounds_of_partitions(topic, range(count)).items():
            messages = list(reader.client_messages(topic, partition, max(low, high - most), high))
            decoded = decode_records(
                task,
                RawRecords(
                    [int(message.offset()) for message in messages], [message.value() for message in messages],
                    partition, messages if task.reads_envelopes else (),
                ),
                samples_per_record=1, max_record_bytes=config.data.max_record_bytes,
                skip_tombstones=config.data.tombstones == "skip", seen=seen,
            )  # fmt: skip
            num_records, num_refused = num_records + len(messages), num_refused + len(decoded.refused)
            reason = reason or next((item.reason for item in decoded.refused), "")
            if decoded.num_samples:
                parts.append(decoded.samples)
    log.info("held_out_topic_read", topic=topic, records=num_records)
    if num_refused and not parts:
        raise ConfigError(f"evaluation.holdout.topic: none of {num_refused} records can be decoded: {short(reason)}")
    if num_refused:
        log.warning("held_out_records_refused", records=num_refused, of=num_records, first_reason=reason)
    try:
        return joined(parts) if parts else batch_of(task, (), 0)
    except ValueError as exc:
        raise ConfigError(f"evaluation.holdout.topic: the samples of its partitions differ in shape: {exc}") from exc
