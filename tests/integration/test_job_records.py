"""What the provisioner reads of a job on a real broker: all of it, once, with the right times, and it goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from doll.config import load
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import kafka_settings
from doll.kafka.reader import JobRecords, TimedRecord
from doll.records.control import Evaluated, Hello, Leave, Metric, encode
from job_rig import MakePipeline
from record_builders import update

pytestmark = pytest.mark.integration

HOUR_S = 3600.0


@pytest.fixture
def job(make_pipeline: MakePipeline) -> Any:
    """Topics, and nobody that writes to them but the test."""
    return make_pipeline()


def hello(term: int) -> Hello:
    return Hello(term=term)


def job_records(job: Any, **positions: int) -> JobRecords:
    """From `topic_partition=offset`, or from the beginning."""
    at = {f"{job.config.topic(name.rsplit('_', 1)[0])}/{name.rsplit('_', 1)[1]}": n for name, n in positions.items()}
    return JobRecords(job.config, job.services, at)


def until(reader: JobRecords, count: int) -> list[TimedRecord]:
    timed_records: list[TimedRecord] = []
    deadline_s = time.monotonic() + 120
    while len(timed_records) < count:
        assert time.monotonic() < deadline_s, f"{len(timed_records)} of {count} letters"
        timed_records += reader.poll(0.2)
    return timed_records


def stamped(job: Any, kind: str, record: Any, at_s: float) -> None:
    """A record whose writer's clock says `at_s`."""
    job._producer.produce(job.config.topic(kind), encode(record), partition=0, timestamp=int(at_s * 1000))
    assert job._producer.flush(30) == 0


def test_history_is_every_topic_and_every_slot_and_a_successor_goes_on_behind_it(job: Any) -> None:
    written = [
        update(1, 1),
        Leave(worker=0, session=1, cause="notice"),
        Metric(source="ps", values={"a": 1.0}, time_s=1.0),
    ]
    for kind, record in zip(("updates", "events", "metrics"), written, strict=True):
        job.control(kind, record)
    for slot in range(2):
        job.control("commands", hello(10 + slot), slot)
    with job_records(job) as reader:
        records = [timed_record.record for timed_record in reader.read_history()]
        assert sorted(map(repr, records)) == sorted(map(repr, [*written, hello(10), hello(11)]))
        assert reader.poll(0.1) == []
        positions = reader.named_positions()
    assert positions == {
        f"{job.config.topic(kind)}/{part}": 1
        for kind, part in (("updates", 0), ("events", 0), ("metrics", 0), ("commands", 0), ("commands", 1))
    }
    job.control("updates", update(1, 2))
    with JobRecords(job.config, job.services, positions) as successor:
        assert [timed_record.record for timed_record in successor.read_history()] == [update(1, 2)]
        job.control("commands", hello(12), 1)
        assert [timed_record.record for timed_record in until(successor, 1)] == [hello(12)]
        assert successor.named_positions()[f"{job.config.topic('commands')}/1"] == 2


def test_what_does_not_decode_is_counted_and_passed(job: Any) -> None:
    """Rubbish, and a record without a value: neither stops the provisioner, nor comes again."""
    for value in (b"rubbish", encode(update(1, 1)), None, encode(update(1, 2))):
        job.produce("updates", value)
    job.control("events", b"\x00\x01")
    with job_records(job) as reader:
        assert [timed_record.record for timed_record in reader.read_history()] == [update(1, 1), update(1, 2)]
        assert reader.refused == 3
        positions = reader.named_positions()
    assert (positions[f"{job.config.topic('updates')}/0"], positions[f"{job.config.topic('events')}/0"]) == (4, 1)
    with JobRecords(job.config, job.services, positions) as successor:
        assert (successor.read_history(), successor.refused) == ([], 0)


def test_a_position_outside_of_what_is_kept_starts_at_the_earliest(job: Any) -> None:
    """Retention has removed what comes next, or the topic was made again under its old name."""
    for version in range(1, 5):
        job.control("updates", update(1, version))
    with job_records(job, updates_0=3) as reader:
        assert [timed_record.record for timed_record in reader.read_history()] == [update(1, 4)]
    with job_records(job, updates_0=99) as reader:
        assert [timed_record.record for timed_record in reader.read_history()] == [
            update(1, version) for version in range(1, 5)
        ]
    admin = AdminClient(kafka_settings(job.config, job.services))
    for future in admin.delete_records([TopicPartition(job.config.topic("updates"), 0, 2)]).values():
        future.result(60)
    with job_records(job, updates_0=1) as reader:
        assert [timed_record.record for timed_record in reader.read_history()] == [update(1, 3), update(1, 4)]


def test_old_letters_have_their_writers_time_and_new_ones_ours(job: Any) -> None:
    """Clocks need not agree: nothing is from the future, and what comes while we listen comes now. In a topic from
    before the broker's clock was asked for; in others it is the only one."""
    topic = ConfigResource(ResourceType.TOPIC, job.config.topic("updates"))
    topic.add_incremental_config(
        ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
    )
    admin = AdminClient(kafka_settings(job.config, job.services))  # the answer comes only while it lives
    for done in admin.incremental_alter_configs([topic]).values():
        done.result(60.0)
    start_s = time.time()
    stamped(job, "updates", update(1, 1), start_s - HOUR_S)
    stamped(job, "updates", update(1, 2), start_s + HOUR_S)
    with job_records(job) as reader:
        old, ahead = reader.read_history()
        assert old.at_s == pytest.approx(start_s - HOUR_S, abs=0.01)
        assert start_s <= ahead.at_s <= time.time()
        stamped(job, "updates", update(1, 3), start_s - HOUR_S)
        (new,) = until(reader, 1)
        assert start_s <= new.at_s <= time.time()


def test_it_tells_where_the_samples_end(job: Any) -> None:
    job.send(job.samples(3), partition=0)
    job.send(job.samples(1), partition=1)
    with job_records(job) as reader:
        assert reader.sample_ends(60.0) == [3, 1]
        job.send(job.samples(2), partition=1)
        assert reader.sample_ends(60.0) == [3, 3]
        assert reader.read_history() == [], "samples are no letters"


def test_where_the_broker_is_away_the_ends_are_not_known_and_reading_goes_on_later(job: Any, broker: Any) -> None:
    job.control("events", Evaluated(term=1, version=1, loss=0.5))
    with job_records(job) as reader:
        assert len(reader.read_history()) == 1
        broker.kill()
        try:
            assert reader.sample_ends(0.5) is None
            assert reader.poll(0.2) == []
        finally:
            broker.restart()
        job.control("updates", update(1, 1))
        assert [timed_record.record for timed_record in until(reader, 1)] == [update(1, 1)]


def test_it_leaves_no_trace_on_the_broker(job: Any) -> None:
    job.control("updates", update(1, 1))
    with job_records(job) as reader:
        reader.read_history()
        reader.poll(0.1)
    admin = AdminClient(kafka_settings(job.config, job.services))
    group = f"doll.{job.config.job}.provision"
    (answer,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    assert answer.result(60).topic_partitions == []
    assert group not in {listed.group_id for listed in admin.list_consumer_groups().result(60).valid}


def test_topics_that_are_not_there_are_an_error_that_names_them(job: Any) -> None:
    other = load(job.job_path, [f"job={job.config.job}-none"])
    with pytest.raises(ServiceUnavailableError, match="-none"):
        JobRecords(other, job.services, {})
