"""Publisher: what is delivered, refused and left over is reported, once each."""

from __future__ import annotations

import pytest
from doll.kafka import topics
from doll.kafka.publisher import ClientError, Delivery, Publisher
from doll.kafka.range_reader import RangeReader
from doll.records.control import Hello
from doll.services import Services
from job_files import job
from structlog.testing import capture_logs


def test_a_full_queue_takes_nothing_more_and_says_so(nowhere: Services) -> None:
    publisher = Publisher(job(), nowhere, queue_buffering_max_messages=2)
    deliveries: list[Delivery] = []
    sent = [publisher.try_send("t", b"value", on_delivery=deliveries.append) for _ in range(3)]
    assert sent == [True, True, False]
    publisher.discard()
    assert len(deliveries) == 2


def test_what_is_discarded_is_reported_as_refused(nowhere: Services) -> None:
    publisher = Publisher(job(), nowhere)
    deliveries: list[Delivery] = []
    with capture_logs() as logs:
        publisher.send("t", b"value", on_delivery=deliveries.append)
        publisher.send("u", b"value")
        publisher.send("u", b"value")
        publisher.discard()
    assert [(delivery.topic, delivery.offset) for delivery in deliveries] == [("t", -1)]
    assert deliveries[0].refusal
    assert set(publisher.refusals) == {"t", "u"}
    # The client's own report that nobody listens there may come in between.
    assert [entry["topic"] for entry in logs if entry["event"] == "kafka_refused"] == ["u"]


def test_what_is_not_delivered_when_it_closes_is_logged(nowhere: Services) -> None:
    with capture_logs() as logs, Publisher(job(), nowhere, on_error=lambda error: None) as publisher:
        publisher.send("t", b"value")
        publisher.close(timeout_s=0.05)
        publisher.discard()
    assert [entry["records"] for entry in logs if entry["event"] == "records_not_delivered"] == [1]


def test_a_record_that_is_too_long_is_refused_before_it_is_queued(nowhere: Services) -> None:
    publisher = Publisher(job(), nowhere, message_max_bytes=1000)
    deliveries: list[Delivery] = []
    assert publisher.try_send("t", bytes(10_000), on_delivery=deliveries.append)
    assert ["too large" in delivery.refusal for delivery in deliveries] == [True]
    publisher.discard()
    assert len(deliveries) == 1


def test_an_unreachable_broker_is_an_error_of_the_client_that_is_not_fatal(nowhere: Services) -> None:
    errors: list[ClientError] = []
    publisher = Publisher(job(), nowhere, on_error=errors.append)
    publisher.send("t", b"value")
    while not any(error.is_unreachable for error in errors):
        publisher.poll(0.1)
    assert not any(error.is_fatal for error in errors)
    publisher.discard()


@pytest.mark.integration
def test_records_arrive_in_order_and_each_delivery_names_its_offset_and_the_time_of_the_broker(
    services: Services, job_name: str
) -> None:
    config = job(name=job_name)
    topics.ensure(config, services)
    events = config.topic("events")
    deliveries: list[Delivery] = []
    with Publisher(config, services) as publisher:
        for term in (1, 2, 3):
            publisher.send(events, Hello(term=term), key=b"k", on_delivery=deliveries.append)
        assert publisher.flush(30.0) == 0
    assert [item._replace(time_ms=-1) for item in deliveries] == [Delivery(events, offset) for offset in range(3)]
    with RangeReader(config, services) as reader:
        stored = reader.messages(events, 0, *reader.bounds(events, 0))
        assert [item.time_ms / 1000 for item in deliveries] == [message.written_s for message in stored]
        assert [record.term for record in reader.records(events, (Hello,))] == [1, 2, 3]


@pytest.mark.integration
def test_what_a_delivery_callback_raises_the_next_poll_raises(services: Services, job_name: str) -> None:
    config = job(name=job_name)
    topics.ensure(config, services)

    def refuse(delivery: Delivery) -> None:
        raise ValueError(f"at {delivery.offset}")

    publisher = Publisher(config, services)
    publisher.send(config.topic("events"), Hello(term=1), on_delivery=refuse)
    with pytest.raises(ValueError, match="at 0"):
        publisher.flush(30.0)
