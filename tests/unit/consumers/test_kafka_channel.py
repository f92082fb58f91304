"""How a worker's channel joins while the broker does not keep up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from doll.config import parse
from doll.consumers.channels import kafka_channel
from doll.consumers.channels.kafka_channel import WorkerChannel
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import translate_errors
from doll.services import Services

CONFIG = parse("job: digits\ntask: {class: 'a:B'}\n")
NOWHERE = Services("127.0.0.1:1", "")
AWAY = (KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT)


def test_a_join_waits_for_a_late_broker_and_ends_at_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand workers that start at once: each asks again, and waits longer for the answer."""
    waits_s: list[float] = []
    codes = iter((*AWAY, KafkaError.TOPIC_AUTHORIZATION_FAILED))

    def late(*_: Any, lookup_timeout_s: float) -> None:
        waits_s.append(lookup_timeout_s)
        with translate_errors(NOWHERE.kafka, "answer"):
            raise KafkaException(KafkaError(next(codes)))

    monkeypatch.setattr(kafka_channel, "Reader", late)
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    channel = WorkerChannel(CONFIG, NOWHERE, 0)
    try:
        with pytest.raises(ServiceUnavailableError, match="doll doctor says which permission is missing"):
            channel.join("process", lambda: False)
    finally:
        channel.close()
    assert waits_s == [5.0, 10.0, 20.0, 20.0]


def test_a_worker_that_is_to_leave_does_not_wait_for_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []

    def late(*_: Any, **__: Any) -> None:
        left.append(True)
        with translate_errors(NOWHERE.kafka, "answer"):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(kafka_channel, "Reader", late)
    channel = WorkerChannel(CONFIG, NOWHERE, 0)
    try:
        assert channel.join("process", lambda: bool(left)) is None
    finally:
        channel.close()
    assert len(left) == 1
