"""When the events of a version are served: whichever of the update and the version comes first."""

from __future__ import annotations

from typing import Any

import pytest
import record_builders
from doll.config.freshness import FreshnessConfig
from doll.evaluation.stored_weights import Place
from doll.records.control import Member, Update
from doll.records.event_times import EventTimes
from doll.serving import job_facts
from doll.serving.job_facts import ServedEvents

pytestmark = pytest.mark.slow  # loads torch

T_MS = 1_800_000_000_000
T_S = T_MS / 1000


def update(term: int, version: int, count: int = 1, **more: Any) -> Update:
    member = Member(
        worker=0, partition=0, batch=version, lo=0, hi=1, n_samples=count, base_version=0,
        times=EventTimes(T_MS, (0,) * min(count, 8), count), **more,
    )  # fmt: skip
    return Update(term=term, version=version, members=(member,), n_samples=count, loss=0.0)


@pytest.fixture
def events() -> ServedEvents:
    events = ServedEvents(FreshnessConfig(event_to_served_s=2.0))
    events.swapped(Place(1, 5), T_S)
    return events


def within(events: ServedEvents) -> tuple[int, int]:
    return events.served.within, events.served.records


def test_an_update_counts_from_the_first_version_that_has_it(events: ServedEvents) -> None:
    events.feed(update(1, 6))
    events.feed(update(1, 7))
    assert within(events) == (0, 0)
    events.swapped(Place(1, 7), T_S + 1)
    assert within(events) == (2, 2)


def test_a_version_may_be_served_before_its_update_is_read(events: ServedEvents) -> None:
    events.swapped(Place(1, 6), T_S + 1)
    events.swapped(Place(1, 8), T_S + 3)
    for version in (6, 7, 8):
        events.feed(update(1, version))
    assert within(events) == (1, 3)


def test_what_the_first_version_has_may_have_been_served_before(events: ServedEvents) -> None:
    events.feed(update(1, 4))
    events.feed(update(1, 5))
    assert within(events) == (0, 0)
    fresh = ServedEvents(FreshnessConfig())
    fresh.feed(update(1, 4))
    fresh.feed(update(1, 6))
    fresh.swapped(Place(1, 5), T_S)
    assert fresh.served.records == 0
    fresh.swapped(Place(1, 6), T_S)
    assert fresh.served.records == 1


def test_an_update_is_counted_once_and_void_ones_never(events: ServedEvents) -> None:
    for version in (6, 6, 7, 8):
        events.feed(update(1, version))
    events.feed(record_builders.term_started(2, resumed=6))
    events.feed(update(1, 9))  # of a server that has been replaced
    events.feed(update(2, 7))
    events.swapped(Place(2, 7), T_S + 1)
    assert events.served.records == 2  # version 6, and version 7 of the new term


def test_what_is_never_served_counts_as_late(events: ServedEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_facts, "_KEPT_BATCHES", 2)
    for version in range(6, 11):
        events.feed(update(1, version, count=10))
    assert (events.served.bad, events.served.within) == (30, 0)


def test_a_batch_of_an_earlier_release_counts_as_without_times(events: ServedEvents) -> None:
    events.feed(record_builders.update(1, 6, (0, 6)))
    events.swapped(Place(1, 6), T_S)
    assert events.served.bad == events.served.records > 0
