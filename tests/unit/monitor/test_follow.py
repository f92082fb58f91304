"""The loop of a process that follows topics: records in order, ready after the history, and the end of its services."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from doll.config import parse
from doll.kafka.reader import Partition, TimedRecord
from doll.monitor import follow as module
from doll.monitor.follow import follow
from doll.services import Services
from statuses import server_status

CONFIG = parse("job: unit\ntask: {class: 'm:Task'}\ndata: {workers: 1, batch_size: 8}")
SERVICES = Services("127.0.0.1:1", "redis://127.0.0.1:1/0")


class FakeTail:
    """Two records of history and then one in each poll."""

    opened = 0

    def __init__(self, config: Any, services: Any, topics: Any) -> None:
        self.ends, self.next = {Partition("t", 0): 2}, 0

    def __enter__(self) -> FakeTail:
        FakeTail.opened += 1
        return self

    def __exit__(self, *exc: object) -> None:
        FakeTail.opened -= 1

    def poll(self, timeout_s: float) -> list[TimedRecord]:
        self.next += 1
        return [TimedRecord(server_status(), 0.0, "t", self.next - 1)]

    def has_read_history(self, partition: Partition) -> bool:
        return self.next >= self.ends[partition]


def test_records_come_with_whether_they_are_new_and_the_end_closes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Tail", FakeTail)
    seen = []
    with closing(follow(CONFIG, SERVICES, "otel", ["t"], pages={"/x": lambda: ("text/plain", b"x")})) as polls:
        for poll in polls:
            (entry,) = poll.entries
            seen.append(
                (entry.offset, poll.has_read_history, poll.is_new(entry), bool(poll.heartbeat.report()["ready"]))
            )
            assert poll.heartbeat.pages["/x"]() == ("text/plain", b"x")
            assert FakeTail.opened == 1
            if len(seen) == 4:
                break
    assert seen == [(0, False, False, False), (1, True, False, True), (2, True, True, True), (3, True, True, True)]
    assert FakeTail.opened == 0
