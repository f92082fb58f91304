"""Leave records for workers that were killed with their machine."""

from __future__ import annotations

import record_builders
from doll.provisioner.fleets.port import Instance, InstanceState
from doll.provisioner.fleets.processes import Machine
from doll.records.control import Leave, Welcome
from kept_records import KeptRecords

from doll_lab.spot.machines import LeaveReporter


def machine(id_: str, *, killed: bool = True, ended_s: float | None = 9.0) -> Machine:
    instance = Instance(id_, 1, 1, "spot", "chain/1", InstanceState.ENDED, 0.0, ended_s)
    return Machine(instance, killed=killed)


def welcome(process: str, worker: int, session: int) -> Welcome:
    return record_builders.welcome(worker, process=process, session=session)


def test_a_killed_machine_is_reported_once_with_the_session_of_its_worker() -> None:
    kept = KeptRecords()
    reporter = LeaveReporter(kept.publisher, "events")
    reporter.feed(welcome("p-1:4711", 1, 7))
    reporter.feed(welcome("p-2:4712", 2, 8))
    running = machine("p-2", ended_s=None)
    reporter.report([machine("p-1"), running])
    reporter.report([machine("p-1"), running])
    assert kept.sent == [("events", Leave(worker=1, session=7, cause="machine taken"))]
    reporter.report([machine("p-2")])
    assert [record for _, record in kept.sent][1:] == [Leave(worker=2, session=8, cause="machine taken")]


def test_workers_that_leave_by_themselves_or_never_joined_are_not_reported() -> None:
    kept = KeptRecords()
    reporter = LeaveReporter(kept.publisher, "events")
    reporter.feed(welcome("p-1:4711", 1, 7))
    reporter.report([machine("p-1", killed=False), machine("p-3")])
    assert kept.sent == []
    reporter.close()
    assert kept.closed
