"""A drill sees the grants on a worker's link, whatever the chunks in which they come, and sends them again later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import record_builders
from doll.config import parse
from doll.control.link_state import TO_WORKER, LinkState
from doll.drill import late_copies
from doll.drill.late_copies import LateCopies
from doll.kafka.publisher import Delivery
from doll.kafka.reader import TimedRecord
from doll.records.control import AnyRecord, Durable, Grant, Ping, Settle, decode
from doll.services import Services

CONFIG = parse("job: t\ntask: {class: 'a:B'}\ndata: {workers: 2}\n")


def grant(number: int, worker: int = 1) -> Grant:
    return record_builders.grant_of(
        term=1, worker=worker, session=1, first=number, grant_ids=(number,), version=1, min_version=1, key="k"
    )


def stream(records: Sequence[AnyRecord]) -> bytes:
    state = LinkState(TO_WORKER, 0.0)
    frames = [state.pack(record, 0.0) for record in records]
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


class Broker:
    """What a drill reads from Kafka, and what it sends."""

    def __init__(self, commands: Sequence[AnyRecord] = ()) -> None:
        self.commands = list(commands)
        self.sent: list[tuple[int, AnyRecord]] = []
        self._reports: list[Any] = []
        self.is_full = False

    def poll(self, timeout_s: float = 0.0) -> list[TimedRecord]:
        for report in self._reports:
            report(Delivery("commands", 0))
        self._reports.clear()
        commands, self.commands = self.commands, []
        return [TimedRecord(record, 0.0, "commands", 0) for record in commands]

    def try_send(self, topic: str, value: bytes, *, partition: int, on_delivery: Any) -> bool:
        if self.is_full:
            return False
        self.sent.append((partition, decode(value)))
        self._reports.append(on_delivery)
        return True

    def close(self) -> None:
        pass


def opened(monkeypatch: pytest.MonkeyPatch, broker: Broker) -> LateCopies:
    monkeypatch.setattr(late_copies, "Reader", lambda *args: None)
    monkeypatch.setattr(late_copies, "Reader", lambda *args: broker)
    monkeypatch.setattr(late_copies, "Publisher", lambda *args: broker)
    copies = LateCopies(CONFIG)
    copies.open(Services("", ""))
    return copies


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_the_newest_grants_of_a_link_are_sent_again_until_the_time_given(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    broker = Broker()
    copies = opened(monkeypatch, broker)
    data = stream([Ping(), *(grant(number) for number in range(20)), Ping()])
    take = copies.watch(1)
    for begin in range(0, len(data), chunk_bytes):
        take(data[begin : begin + chunk_bytes])
    is_delivered = copies.send_later(1, Grant, 14.0, 10.0, seed=3)
    assert is_delivered is not None
    copies.poll(10.1)
    assert not broker.sent
    copies.poll(12.0)
    assert 0 < len(broker.sent) < 8
    assert not is_delivered()
    copies.poll(14.0)
    copies.poll(14.1)  # takes in what Kafka has acknowledged
    assert is_delivered()
    assert [worker for worker, _ in broker.sent] == [1] * 8
    assert sorted(record.first for _, record in broker.sent if isinstance(record, Grant)) == list(range(12, 20))
    assert [record for _, record in broker.sent] != [grant(number) for number in range(12, 20)]  # not in their order


def test_commands_of_kafka_are_copied_too_and_only_of_the_kind_and_worker_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle = Settle(term=1, worker=0, session=1, until=4)
    broker = Broker([settle, grant(1, worker=0), Durable(term=1, worker=0, until={0: 3}, batches=3)])
    copies = opened(monkeypatch, broker)
    copies.poll(0.0)
    assert copies.send_later(1, Grant, 1.0, 0.0, seed=1) is None
    assert copies.send_later(0, Settle, 1.0, 0.0, seed=1) is not None
    copies.poll(2.0)
    assert broker.sent == [(0, settle)]


def test_a_full_queue_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker([grant(1)])
    copies = opened(monkeypatch, broker)
    copies.poll(0.0)
    copies.send_later(1, Grant, 1.0, 0.0, seed=1)
    broker.is_full = True
    copies.poll(2.0)
    assert not broker.sent
    broker.is_full = False
    copies.poll(3.0)
    assert broker.sent == [(1, grant(1))]
