"""Which update ends a fault, and what a report says of it."""

from __future__ import annotations

from typing import Any

import msgspec
import record_builders
from doll.records.control import Member, Update
from record_builders import term_started

from doll_lab.drill.plan import FAULT_KINDS, Fault
from doll_lab.drill.recovery import PoisonTracker, RecoveryTracker
from doll_lab.drill.report_lines import drill_lines
from doll_lab.drill.status_trackers import ControlTracker, SetTracker


def fault(kind: str, number: int = 1) -> Fault:
    (match,) = (entry for entry in FAULT_KINDS if entry.name == kind)
    return Fault(number, match, worker=0, gap_s=1.0, hold_s=match.hold_s[0], overlapping=False)


def update(time_s: float, term: int = 1, version: int = 1) -> Update:
    return record_builders.update(term, version, n_samples=8, samples_total=8, time_s=time_s)


def dead_in(time_s: float, partition: int, offset: int) -> Update:
    member = Member(
        worker=partition, partition=partition, batch=0, lo=0, hi=8, n_samples=7, base_version=0, dead=(offset,)
    )
    return msgspec.structs.replace(update(time_s), members=(member,))


def test_only_an_update_that_came_after_the_fault_ends_it() -> None:
    recoveries = RecoveryTracker()
    recoveries.feed(term_started(1))
    recoveries.inject(fault("worker_kill"), 10.0)
    recoveries.feed(update(9.9))  # was on its way
    assert len(recoveries.open) == 1
    recoveries.feed(update(10.5))
    recoveries.feed(update(11.5))
    assert recoveries.open == ()
    assert recoveries.report()["recovery_s"] == {"p50": 0.5, "max": 0.5}


def test_the_death_of_a_server_is_ended_by_its_successor_only() -> None:
    recoveries = RecoveryTracker()
    recoveries.feed(term_started(4))
    recoveries.inject(fault("ps_kill"), 10.0)
    recoveries.feed(update(10.1, term=4))  # applied while the signal was on its way
    assert len(recoveries.open) == 1
    recoveries.feed(term_started(5))
    recoveries.feed(update(13.0, term=5))
    assert recoveries.open == ()
    assert recoveries.report()["ps_recovery_s"] == {"p50": 3.0, "max": 3.0}


def test_a_frozen_server_goes_on_itself() -> None:
    recoveries = RecoveryTracker()
    recoveries.feed(term_started(4))
    recoveries.inject(fault("ps_freeze"), 10.0)
    recoveries.feed(update(12.0, term=4))
    report = recoveries.report()
    assert report["recovery_s"] == {"p50": 2.0, "max": 2.0}
    assert report["ps_recovery_s"] == {"p50": None, "max": None}  # nobody died


def test_a_server_that_is_cut_off_goes_on_when_it_is_restored_or_its_successor_at_once() -> None:
    cut = fault("ps_cut_kafka")  # for half a second
    recoveries = RecoveryTracker()
    recoveries.feed(term_started(4))
    recoveries.inject(cut, 10.0)
    recoveries.feed(update(10.2, term=4))  # it had all gradients; nobody could hear of it
    assert len(recoveries.open) == 1
    recoveries.feed(update(10.7, term=4))
    recoveries.inject(cut, 20.0)
    recoveries.feed(update(20.3, term=5))
    assert recoveries.report()["recovery_s"] == {"p50": 0.5, "max": 0.7}


def test_a_server_without_control_links_goes_on_through_kafka() -> None:
    recoveries = RecoveryTracker()
    recoveries.feed(term_started(4))
    recoveries.inject(fault("ps_cut_control"), 10.0)  # for a second
    recoveries.feed(update(10.25, term=4))
    assert recoveries.report()["recovery_s"] == {"p50": 0.25, "max": 0.25}


def test_a_poison_record_is_recovered_from_when_an_update_counts_it_as_dead() -> None:
    recoveries = RecoveryTracker()
    recoveries.feed(term_started(1))
    recovery = recoveries.inject(fault("stream_poison"), 10.0, PoisonTracker(0, records=1))
    recoveries.feed(update(10.5))  # the job goes on, but it has not come to the record
    recoveries.add_poison_offset(recovery, 5)
    recoveries.feed(dead_in(11.0, 0, 4))  # learned, and another one dead
    recoveries.feed(dead_in(11.1, 1, 5))  # of another stream
    assert len(recoveries.open) == 1
    recoveries.feed(dead_in(12.0, 0, 5))
    assert recoveries.open == ()
    assert recoveries.report()["recovery_s"] == {"p50": 2.0, "max": 2.0}


def test_a_stream_that_is_behind_comes_to_the_poison_in_its_turn() -> None:
    recoveries = RecoveryTracker()
    recovery = recoveries.inject(fault("stream_poison"), 10.0, PoisonTracker(0, records=1))
    recoveries.add_poison_offset(recovery, 5)
    recoveries.feed(dead_in(200.0, 0, 4))  # its batches begin at 0: the stream is not past the record
    assert recovery.waiting_since_s == 200.0
    late = msgspec.structs.replace(dead_in(0, 0, 9).members[0], lo=8, hi=16)
    recoveries.feed(msgspec.structs.replace(update(300.0), members=(late,)))  # past it, and it is not counted
    assert recovery.waiting_since_s == 200.0


def test_an_update_may_come_before_kafka_says_where_the_poison_is() -> None:
    recoveries = RecoveryTracker()
    recovery = recoveries.inject(fault("stream_poison"), 10.0, PoisonTracker(0, records=1))
    recoveries.feed(dead_in(10.25, 0, 5))
    recoveries.add_poison_offset(recovery, 5)
    assert recoveries.open == ()
    assert recoveries.report()["recovery_s"] == {"p50": 0.25, "max": 0.25}


def test_one_of_several_poison_records_may_be_harmless() -> None:
    recoveries = RecoveryTracker()
    poison = PoisonTracker(0, records=2, harmless=1)
    recovery = recoveries.inject(fault("stream_poison"), 10.0, poison)
    for offset in (3, 5):
        recoveries.add_poison_offset(recovery, offset)
    recoveries.feed(dead_in(11.0, 0, 7))  # both are learned from
    assert len(recoveries.open) == 1
    recoveries.feed(dead_in(12.0, 0, 5))  # the batch was counted again, by a successor
    assert recoveries.open == ()
    assert (poison.dead, poison.learned) == ({5}, {3})


def test_deleting_what_is_durable_holds_nothing_up() -> None:
    recoveries = RecoveryTracker()
    recoveries.feed(term_started(1))
    recoveries.inject(fault("stream_truncate"), 10.0)
    recoveries.feed(update(10.25))
    assert recoveries.report()["recovery_s"] == {"p50": 0.25, "max": 0.25}


def test_the_report_counts_what_was_not_recovered_from() -> None:
    recoveries = RecoveryTracker()
    for number, kind in enumerate(("worker_kill", "redis_kill", "worker_kill"), 1):
        recoveries.inject(fault(kind, number), float(number))
    recoveries.feed(update(2.5))
    report: dict[str, Any] = recoveries.report()
    assert report["faults"] == {"redis_kill": 1, "worker_kill": 2}
    assert report["recoveries"] == 2
    assert report["recovery_s"] == {"p50": 1.0, "max": 1.5}
    report |= {"control": ControlTracker("kafka").report(), "sets": SetTracker().report()}
    counted = {"missing": 2, "duplicate": 3}
    lines = drill_lines(report | {"audit": counted, "batch_size": 8, "records_per_batch": 4})
    assert "  recoveries 2 of 3, samples lost 4, samples duplicated 6" in lines
    assert any(line.split() == ["worker_kill", "2", "1.50", "1.50"] for line in lines)
    lines = drill_lines(report | {"audit": None, "batch_size": 8, "records_per_batch": 4})
    assert any("unknown (no audit)" in line for line in lines)
