"""A log that seems to end before what was read of it: a new leader that does not know yet, or another log."""

from __future__ import annotations

import itertools

import pytest
from doll.errors import ConfigError
from doll.kafka import samples_topic
from doll.kafka.samples_topic import bounds_reaching


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
