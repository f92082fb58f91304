"""The sender while no broker is there: nothing waits for ever, nothing is lost without being counted."""

from __future__ import annotations

import threading

from doll import config as job_config
from doll.producers.sender import SampleSender
from doll.services import Services

CONFIG = job_config.parse("job: t\ntask: {class: 'a:B'}\ndata: {max_record_bytes: 1000}")


def _always() -> bool:
    return True


def test_nothing_connects_before_the_first_sample(nowhere: Services) -> None:
    threads = threading.active_count()
    said: list[str] = []
    sender = SampleSender(CONFIG, nowhere, said.append)
    sender.poll()
    sender.drain(_always, 10.0)
    assert sender._publisher is None
    assert threading.active_count() == threads
    assert not said


def test_what_is_not_delivered_in_the_end_counts_as_failed_and_is_told_once(nowhere: Services) -> None:
    said: list[str] = []
    sender = SampleSender(CONFIG, nowhere, said.append)
    assert all(sender.send(0, b"sample", 2, _always) for _ in range(5))
    sender.send_metric({"sent_total": 10}, 0.0)
    assert (sender.counts.sent, sender.counts.delivered, sender.counts.failed) == (10, 0, 0)
    sender.drain(_always, 0.3)
    assert (sender.counts.sent, sender.counts.delivered, sender.counts.failed) == (10, 0, 10)
    assert len([text for text in said if "a record of 2 samples was not delivered" in text]) == 1
    assert len([text for text in said if "is unreachable: samples wait" in text]) <= 1


def test_a_full_queue_makes_the_sender_wait_until_it_is_told_to_give_up(nowhere: Services) -> None:
    sender = SampleSender(CONFIG, nowhere, list[str]().append)
    record = bytes(15_000_000)
    sent = 0
    while sender.send(0, record, 1, _always):
        sent += 1
        assert sent < 20, "the queue has no bound"
    assert sent >= 1
    assert sender.counts.sent == sent  # the refused one is the caller's to count
    asked: list[None] = []

    def third_time() -> bool:
        asked.append(None)
        return len(asked) == 3

    assert not sender.send(0, record, 1, third_time)
    assert len(asked) == 3
    sender.drain(_always, 0.0)
    assert sender.counts.failed == sent


def test_a_record_too_long_for_the_topic_is_refused_on_the_spot(nowhere: Services) -> None:
    said: list[str] = []
    sender = SampleSender(CONFIG, nowhere, said.append)
    assert sender.send(0, bytes(16 * 1024 * 1024 + 1), 1, _always)
    assert (sender.counts.sent, sender.counts.failed) == (1, 1)
    assert "too large" in said[0]
