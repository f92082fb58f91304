"""A log that seems to end before what was read of it: a new leader that does not know yet, or another log."""

from __future__ import annotations

import itertools

import pytest
from doll.config import parse
from doll.errors import ConfigError
from doll.kafka import samples_topic, topics
from doll.kafka.samples_topic import bounds_reaching, describe_samples, refuse_replaced_topic
from doll.services import Services


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_topic, "_RETRY_S", 0.0)


def test_a_leader_that_does_not_know_yet_how_far_its_log_is_committed_is_asked_again() -> None:
    ends = itertools.chain([22_083, 22_083], itertools.repeat(22_150))
    assert bounds_reaching("samples", 1, 22_101, lambda name, partition: (7, next(ends))) == (7, 22_150)


def test_a_log_that_stays_shorter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_topic, "_LEADER_SETTLE_S", 0.0)
    with pytest.raises(ConfigError, match=r"samples/1 ends at offset 50, but it was read up to offset 51.*--fresh"):
        bounds_reaching("samples", 1, 51, lambda name, partition: (0, 50))


def test_another_topic_of_the_same_name_is_refused_and_unknown_ids_are_not() -> None:
    with pytest.raises(ConfigError, match=r"expected Kafka's topic id a, found b.*--fresh"):
        refuse_replaced_topic("samples", "a", "b")
    for expected, actual in (("", "b"), ("a", ""), ("a", "a")):
        refuse_replaced_topic("samples", expected, actual)


def test_the_samples_topic_must_reach_as_far_as_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse("job: j\ntask: {class: 'a:B'}\ndata: {workers: 2}\n")
    monkeypatch.setattr(topics, "topic_id", lambda *_: "id")
    monkeypatch.setattr(samples_topic, "_LEADER_SETTLE_S", 0.0)
    ends = {0: (1, 10), 1: (2, 20)}

    def describe(read_until: tuple[int, int]) -> samples_topic.SampleLog:
        return describe_samples(
            config, Services("", ""), lambda name, partition: ends[partition], expected_id="id", read_until=read_until
        )

    assert describe((10, 20)) == samples_topic.SampleLog("doll.j.samples", "id", (1, 2), (10, 20))
    with pytest.raises(ConfigError, match=r"samples/1 ends at offset 20, but it was read up to offset 21"):
        describe((10, 21))
