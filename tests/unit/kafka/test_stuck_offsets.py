"""A client whose call for offsets never returns: librdkafka, after its group's broker was away (its issue 5456)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from doll.errors import ServiceUnavailableError
from doll.kafka import group_stream
from doll.kafka.group_stream import AbandonedError, TransactionalWriter
from doll.services import Services
from job_files import job


class StuckProducer:
    """Refuses further calls while one has not returned, as librdkafka does."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = 0
        self.purged = False

    def init_transactions(self, timeout_s: float) -> None: ...

    def begin_transaction(self) -> None:
        self.began += 1

    def send_offsets_to_transaction(self, offsets: Any, member: Any, timeout_s: float) -> None:
        self.go.wait()

    def commit_transaction(self, timeout_s: float) -> None:
        pytest.fail("offsets are not in the transaction")

    def abort_transaction(self, timeout_s: float) -> None:
        pytest.fail("another call of this client has not returned")

    def purge(self) -> None:
        self.purged = True


def test_a_call_that_never_returns_ends_the_transaction_and_not_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StuckProducer()
    monkeypatch.setattr(group_stream, "make_producer", lambda *args, **settings: client)
    monkeypatch.setattr(group_stream, "_MARGIN_S", 0.0)
    try:
        writer = TransactionalWriter(job(), Services("127.0.0.1:1", "127.0.0.1:1"), "test", call_s=0.01)
        with pytest.raises(AbandonedError, match=r"does not answer for 0.01 s"):
            writer.commit([TopicPartition("samples", 0, 1)])
        writer.abort()
        writer.close()
        assert client.began == 1
        assert client.purged
        with pytest.raises(ServiceUnavailableError), writer.transaction():
            writer.commit([TopicPartition("samples", 0, 1)])
    finally:
        client.go.set()
