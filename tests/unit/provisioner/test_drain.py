"""`doll provision drain` needs the fleet and its lease only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from doll.cli.app import app
from doll.errors import FencedError, ServiceUnavailableError
from doll.provisioner.billing import EC2_LINUX, LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.fleets.port import InstanceState, Order
from doll.provisioner.lease import Lease
from doll.provisioner.machines import Machines
from doll.provisioner.main import DRAIN_TIMEOUT_S, drain
from doll.provisioner.prices.port import StatedPrices
from doll.provisioner.reconcile import Launch
from doll.provisioner.state_store import FileStateStore
from doll.run.local import provisioning
from doll.storage.file_checkpoints import FileCheckpointStore
from fake_fleet import FakeFleet, VirtualClock
from job_files import job
from job_world import FlatPrices, JobWorld, settings
from memory_state_store import MemoryStateStore
from statuses import server_status
from typer.testing import CliRunner


class NoPrices:
    """A feed that does not answer."""

    def current(self, now_s: float) -> Any:
        raise ServiceUnavailableError("no prices")

    def series(self, *args: Any) -> Any:
        raise ServiceUnavailableError("no prices")


class Place:
    """A fleet with four machines and a drain of it in virtual time."""

    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.fleet = FakeFleet(self.clock, ending_s=5.0)
        self.claims = FileCheckpointStore(folder, "job")
        self.store = MemoryStateStore()
        self.config = job("data.workers=4", "data.batch_size=25", "arrivals.process=asap")  # which no plan is made of

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return True

    def drain(self, wait: Callable[[float], bool] | None = None) -> Any:
        machines = Machines(self.fleet, NoPrices(), EC2_LINUX)
        lease = Lease(self.claims)
        return drain(self.config, machines, lease, self.store, wait or self.wait, clock=self.clock)


def test_without_kafka_redis_prices_or_a_plan_everything_is_ended(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for slot in range(4):
        place.fleet.launch(Order(slot, 1, "spot"))
    decision = place.drain()
    assert (decision.phase, decision.finished, decision.prices) == ("drain", True, None)
    assert {machine.state for machine in place.fleet.all_instances()} == {InstanceState.ENDED}
    assert sum(entry["kind"] == "end" for entry in place.store.journal) == 4
    assert place.store.load() is None, "it has not read the topics, so it must not say what was spent"


@pytest.mark.slow
def test_the_command_needs_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("job: t\ntask: {class: 'a:B'}\ndata: {workers: 2}\nkafka: {address: '127.0.0.1:1'}\n")
    monkeypatch.setenv("DOLL_REDIS", "redis://127.0.0.1:1/0")
    fleet = FakeFleet(time.time)
    runs = Controller(settings(2), fleet, FlatPrices(), LOCAL, FileStateStore(tmp_path, "t"), job="t")
    runs.observed.feed(server_status(), time.time())
    assert len(runs.turn(time.time()).alive) == 2
    monkeypatch.setattr(
        provisioning, "machines_of", lambda *_: nullcontext(Machines(fleet, StatedPrices(0.1, 0.3), LOCAL))
    )
    result = CliRunner().invoke(app, ["provision", "drain", str(path), "--run-folder", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert [machine.state for machine in fleet.all_instances()] == [InstanceState.ENDED] * 2
    assert json.loads(result.stdout)["finished"] is True


def test_the_provisioner_that_runs_is_fenced_and_its_state_goes_on(tmp_path: Path) -> None:
    """Bills and launches continue in the state: nothing is spent twice, no incarnation is used twice."""
    place = Place(tmp_path)
    asked = settings()
    world = JobWorld(place.clock, place.fleet, asked)
    first = Lease(place.claims)

    def controller(lease: Lease | None = None) -> Controller:
        return Controller(
            asked, place.fleet, FlatPrices(), LOCAL, place.store, job=place.config.job, topics_id="these",
            check_lease=(lambda: None) if lease is None else lease.check,
        )  # fmt: skip

    runs = controller(first)
    for _ in range(5):
        world.tell(runs)
        before = runs.turn(place.clock())
        place.wait(10.0)
        world.pass_time(10.0)
    drained = place.drain()
    with pytest.raises(FencedError, match="has taken its place"):
        runs.turn(place.clock())
    assert {machine.state for machine in place.fleet.all_instances()} == {InstanceState.ENDED}
    after = controller()
    world.pass_time(0.0)
    world.tell(after)
    decision = after.turn(place.clock())
    assert decision.started_s == before.started_s
    assert decision.turn > drained.turn
    assert decision.bill.usd >= before.bill.usd > 0
    orders = [entry.action.order for entry in decision.actions if isinstance(entry.action, Launch)]
    assert [order.incarnation for order in orders] == [2] * 4
    other = Controller(asked, place.fleet, FlatPrices(), LOCAL, place.store, job=place.config.job, topics_id="others")
    assert other.turn(place.clock()).started_s == place.clock(), "the drain has not made another run's state its own"


def test_a_fleet_that_does_not_answer_is_asked_for_minutes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.fleet.launch(Order(0, 1, "spot"))
    place.fleet.become_unavailable(10)
    assert place.drain().finished
    place.fleet.become_unavailable(1000)
    with pytest.raises(ServiceUnavailableError, match=rf"not terminated after {DRAIN_TIMEOUT_S:g} s.*does not answer"):
        place.drain()


def test_a_stop_is_obeyed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.fleet.launch(Order(0, 1, "spot"))
    assert place.drain(lambda _: False) is None


def test_a_disk_that_cannot_be_written_keeps_no_machine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = Place(tmp_path)
    place.store = FileStateStore(tmp_path / "file", "t")  # type: ignore[assignment]
    place.fleet.launch(Order(0, 1, "spot"))
    assert place.drain().finished
