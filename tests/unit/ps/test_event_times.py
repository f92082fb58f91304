"""The event times of a version are those of the records in it, whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from doll.config.freshness import FreshnessConfig
from doll.ps.engine import events as ev
from doll.ps.engine.measures import FreshnessMeter
from doll.records.control import Push, PushedBatch, decode, encode
from doll.records.event_times import NO_EVENTS, NO_TIME, EventSpan, EventTimes, event_times_of
from engine_runs import play, random_steps
from engine_world import POLICIES, World
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch

NOW_MS = 1_800_000_000_000


class TimedWorld(World):
    """Compares the event times of each version with those of its records.

    Attributes:
        learned: of each partition: one above the last offset in the model.
        learned_at: the same by version of the checkpoint.
    """

    def __init__(self, policy: Any) -> None:
        self.learned: list[int] = []
        self.learned_at: dict[int, list[int]] = {}
        self.num_compared = 0
        super().__init__(policy)

    def start_server(self) -> None:
        super().start_server()
        self.learned = list(self.learned_at.get(self.engine.version, self.origins))

    @staticmethod
    def time_ms(partition: int, offset: int) -> int:
        """The time of a record; every seventh has none."""
        number = (partition * 1009 + offset) * 7919 % 100_003
        return NO_TIME if number % 7 == 0 else NOW_MS - 1000 * number

    def times_of(self, partition: int, offsets: Sequence[int]) -> EventTimes:
        return event_times_of([self.time_ms(partition, offset) for offset in offsets], NOW_MS, 1000)

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if isinstance(action, ev.ApplyUpdate):
            for item in action.sets:
                for batch in item.batches:
                    assert self.learned[batch.partition] == batch.lo
                    self.learned[batch.partition] = batch.hi
            self.compare(action.events)
        elif isinstance(action, ev.StoreCheckpoint):
            self.compare(action.snapshot.events)
            self.learned_at[action.version] = list(self.learned)
        return super().perform(action)

    def compare(self, span: EventSpan) -> None:
        times = [
            self.time_ms(partition, offset)
            for partition, until in enumerate(self.learned)
            for offset in range(self.origins[partition], until)
        ]
        good = [time for time in times if time != NO_TIME]
        expected = EventSpan(min(good, default=0), max(good, default=0), len(good), len(times) - len(good))
        assert span == expected
        self.num_compared += bool(good)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(200, 2000))
def test_a_version_has_the_event_times_of_its_records(policy: str, seed: int, length: int) -> None:
    world = TimedWorld(POLICIES[policy])
    play(world, random_steps(seed, length))
    world.settle()


@pytest.mark.slow
def test_versions_were_compared() -> None:
    world = TimedWorld(POLICIES["doll"])
    play(world, random_steps(3, 3000))
    world.settle()
    assert world.num_compared > 20
    assert world.engine.events.bad > 0


def test_a_checkpoint_and_a_push_of_an_earlier_release_are_read() -> None:
    world = World("doll")
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(world.engine.snapshot(0.0)))
    del content["events"]
    assert msgspec.convert(content, ev.EngineSnapshot).events == NO_EVENTS
    pushed = PushedBatch(batch=0, grant_id=1, n_samples=7, loss_sum=0.0)
    data = encode(Push(worker=0, session=1, term=1, version=0, key="", batches=(pushed,)))
    read = decode(b"\xd0\x0a" + data[2:])
    assert isinstance(read, Push)
    assert read.batches[0].times is None
    assert read.batches[0].known_times == EventTimes(bad=7)


def update_of(version: int, *times: EventTimes) -> ev.ApplyUpdate:
    batches = tuple(
        PushedBatch(batch=at, grant_id=at, n_samples=1, loss_sum=0.0, times=each) for at, each in enumerate(times)
    )
    push = Push(worker=0, session=1, term=1, version=0, key="k", batches=batches)
    return ev.ApplyUpdate(version, (ev.AppliedSet(push, 0.0, ()),), 1.0, 1, 1)


def test_events_are_learned_with_their_update_and_durable_with_a_checkpoint_of_it() -> None:
    meter = FreshnessMeter(FreshnessConfig(event_to_learned_s=1.0, event_to_durable_s=2.0))
    now_s, event = NOW_MS / 1000, EventTimes(NOW_MS, (0,), 1)
    for version in (1, 2, 3):
        meter.applied(update_of(version, event, EventTimes(bad=1)), now_s + 0.5 * version)
    assert (meter.learned.records, meter.learned.within, meter.learned.bad) == (6, 2, 3)
    assert meter.durable.records == 0
    meter.stored(2, now_s + 1.9)
    assert (meter.durable.records, meter.durable.within) == (4, 2)
    meter.stored(2, now_s + 9.0)
    assert meter.durable.records == 4
    meter.stored(3, now_s + 9.0)
    assert (meter.durable.records, meter.durable.within) == (6, 2)
