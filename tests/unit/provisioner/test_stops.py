"""`doll provision clear`: what a provisioner has stopped goes on, and not before."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from doll.cli.app import app
from doll.config import load
from doll.errors import FencedError
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.lease import Lease, claims_of, holder_of
from doll.provisioner.state_store import clear_stops, state_of
from fake_fleet import FakeFleet, VirtualClock
from job_world import FlatPrices, JobWorld, settings
from typer.testing import CliRunner

pytestmark = pytest.mark.slow  # hundreds of turns on a state that is synced to the disk


class Place:
    """A job whose workers never join, and its provisioners."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "job.yaml"
        self.path.write_text("job: t\ntask: {class: 'a:B'}\ndata: {workers: 4}\n")
        self.config = load(self.path)
        self.clock = VirtualClock()
        self.fleet = FakeFleet(self.clock, boot_s=20.0)
        self.job = settings(updates=1000, deadline_s=20_000.0, max_stall_s=600.0)
        self.world = JobWorld(self.clock, self.fleet, self.job, join_s=math.inf)

    def start(self) -> Controller:
        lease = Lease(claims_of(self.config, self.folder))
        store = state_of(self.config, self.folder, lease.number)
        store.take()
        return Controller(
            self.job, self.fleet, FlatPrices(), LOCAL, store, check_lease=lease.check, job="t", topics_id="u"
        )

    def turns(self, controller: Controller, count: int) -> Decision:
        for _ in range(count):
            self.world.tell(controller)
            decision = controller.turn(self.clock())
            if decision.finished:
                break
            self.clock.advance(10.0)
            self.world.pass_time(10.0)
        return decision

    def clear(self) -> str:
        result = CliRunner().invoke(app, ["provision", "clear", str(self.path), "--run-folder", str(self.folder)])
        assert result.exit_code == 0, result.output
        return result.stdout


def test_a_stop_lasts_until_it_is_cleared(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.clear() == "nothing is stopped\n"
    assert place.turns(place.start(), 10).phase == "run"
    claims = claims_of(place.config, tmp_path)
    assert place.clear() == "nothing is stopped\n"
    assert claims.newest_term() == 1, "the provisioner that runs goes on"
    decision = place.turns(place.start(), 100)
    assert (decision.phase, decision.finished) == ("failed", True)
    assert "doll provision clear JOB.yaml" in decision.alarms[0]
    launched = len(place.fleet.all_instances())
    stopped = place.start()
    assert place.turns(stopped, 1).phase == "failed"
    said = place.clear()
    assert said.startswith("cleared: the job: no update since ")
    assert holder_of(claims).state == "left", "a standby need not wait"
    assert '"kind": "cleared"' in (tmp_path / "provision-t.jsonl").read_text()
    with pytest.raises(FencedError):
        stopped.turn(place.clock())
    assert len(place.fleet.all_instances()) == launched
    assert clear_stops(place.config, tmp_path) == []
    again = place.start()
    assert place.turns(again, 1).phase == "run"
    assert len(place.fleet.alive()) == 4
    assert place.turns(again, 100).phase == "failed", "its cause is still there"


def test_a_slot_that_was_given_up_gets_one_more_machine(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.job = settings(updates=1000, deadline_s=20_000.0)
    place.world = JobWorld(place.clock, place.fleet, place.job)

    def fail(turns: int) -> None:
        for _ in range(turns):
            place.turns(controller, 1)
            for machine in place.fleet.alive():
                if machine.slot == 2:
                    place.fleet.fail_instance(machine.id)

    controller = place.start()
    fail(60)
    of_slot = [machine for machine in place.fleet.all_instances() if machine.slot == 2]
    assert len(of_slot) == place.job.limits.max_failures
    controller = place.start()
    fail(20)
    assert [machine for machine in place.fleet.all_instances() if machine.slot == 2] == of_slot, (
        "a restart is no person"
    )
    (stop,) = clear_stops(place.config, tmp_path)
    assert stop.startswith("slots 2: ")
    controller = place.start()
    fail(20)
    assert len([machine for machine in place.fleet.all_instances() if machine.slot == 2]) == len(of_slot) + 1
