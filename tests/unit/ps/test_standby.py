"""When a standby takes over: silence of the newest leader, not of the wires, and not of a zombie."""

from __future__ import annotations

import pytest
from doll.ps.standby import Watch
from doll.records import AnyRecord, Epoch, Finished, Metric, Update


def metric(ps_epoch: int, source: str = "ps") -> Metric:
    return Metric(source=source, values={"ps_epoch": ps_epoch, "version": 3}, time_s=0.0)


def update(ps_epoch: int) -> Update:
    return Update(
        ps_epoch=ps_epoch, version=1, members=(), n_samples=1, loss=1.0, metrics={}, samples_total=1, time_s=0.0
    )


@pytest.mark.parametrize(
    "sign", [metric(1), update(1), Epoch(ps_epoch=1, resumed_version=0, origins=(0,), records_per_batch=1, time_s=0.0)]
)
def test_every_sign_of_life_begins_the_lease_anew(sign: AnyRecord) -> None:
    watch = Watch(5.0, now=100.0)
    assert not watch.is_over(104.9)
    watch.feed(sign, 104.0)
    assert not watch.is_over(108.9)
    assert watch.is_over(109.0)


def test_others_and_zombies_are_no_sign_of_the_leaders_life() -> None:
    watch = Watch(5.0, now=0.0)
    watch.feed(metric(2), 1.0)
    watch.feed(metric(2, source="producer"), 5.0)
    watch.feed(metric(1), 5.0)
    watch.feed(update(1), 5.5)
    assert watch.is_over(6.0)
    watch.feed(metric(3), 6.5)
    assert not watch.is_over(11.0)


def test_nobody_is_taken_for_dead_while_nobody_can_be_heard() -> None:
    watch = Watch(5.0, now=0.0)
    watch.deaf(20.0)
    assert not watch.is_over(24.0)
    assert watch.is_over(25.0)


def test_the_end_of_the_job_ends_the_wait() -> None:
    watch = Watch(5.0, now=0.0)
    watch.feed(update(1), 1.0)
    assert not watch.finished
    watch.feed(Finished(ps_epoch=1, version=1, reason="updates", time_s=0.0), 2.0)
    assert watch.finished
