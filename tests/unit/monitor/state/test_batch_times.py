"""The times of a batch are put together from the durations in update records."""

from __future__ import annotations

from typing import Any

import pytest
from doll.monitor.state.batch_times import DurableBatches, times_of
from doll.records.control import Member, Update


def member(batch: int, **more: Any) -> Member:
    given = {
        "worker": 1, "partition": 2, "batch": batch, "lo": 10 * batch, "hi": 10 * batch + 10, "n_samples": 10,
        "base_version": 6, "set_grant_id": 40, **more,
    }  # fmt: skip
    return Member(**given)


def update(*members: Member, version: int = 7, term: int = 3, time_s: float = 100.0) -> Update:
    samples = sum(item.n_samples for item in members)
    return Update(term=term, version=version, members=members, n_samples=samples, loss=1.0, time_s=time_s)


def test_the_batches_of_a_set_follow_each_other() -> None:
    # Granted at 90, pushed at 96; weights took 1 s, the gradients 1.5 and 2.5 s, storing 0.5 s.
    both = {"fetch_s": 0.5, "store_s": 0.25, "grant_to_push_s": 6.0, "grant_to_update_s": 10.0}
    first, second = times_of(
        update(member(0, compute_s=1.5, wait_s=3.0, **both), member(1, compute_s=2.5, wait_s=0.5, **both))
    )
    assert (first.begun_s, first.fetched_s) == pytest.approx((90.5, 91.5))
    assert (first.computing_s, first.computed_s) == pytest.approx((91.5, 93.0))
    assert (second.computing_s, second.computed_s) == pytest.approx((93.0, 95.5))
    assert (first.pushed_s, second.pushed_s, first.applied_s) == pytest.approx((96.0, 96.0, 100.0))
    assert (first.ready_s, second.ready_s) == pytest.approx((87.5, 90.0))
    assert (first.partition, first.lo, first.hi, first.version, first.base_version) == (2, 0, 10, 7, 6)


def test_batches_without_samples_and_updates_of_earlier_releases_have_no_times() -> None:
    assert list(times_of(update(member(0, n_samples=0, grant_to_update_s=1.0)))) == []
    assert list(times_of(update(member(0)))) == []


def test_a_sample_of_batches_is_complete_with_its_checkpoint() -> None:
    batches = DurableBatches(2.0)
    for version in range(1, 101):  # ten updates per second
        batches.add(
            update(member(version, grant_to_update_s=0.1), version=version, time_s=1000.0 + version / 10)
        )  # fmt: skip
    assert batches.durable(0, 1010.0) == []
    done = batches.durable(60, 1011.0)
    assert 13 <= len(done) <= 15, "two per second, and a second's worth at once at first"
    assert {batch.durable_s for batch in done} == {1011.0}
    assert max(batch.version for batch in done) <= 60
    # A server that begins again makes later versions void, and makes them again.
    batches.add(update(member(61, grant_to_update_s=0.1), version=61, term=4, time_s=1020.0))
    (again,) = batches.durable(200, 1021.0)
    assert (again.term, again.version) == (4, 61)
