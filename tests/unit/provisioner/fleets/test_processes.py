"""Real processes as instances, on a clock that the test sets: boots, refusals, notices, surprises, kills, a crash."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from doll.errors import ConfigError
from doll.local.forks import ForkServer
from doll.local.supervisor import RoleSpec
from doll.provisioner.billing import LOCAL, bill
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.fleets.processes import Machine, ProcessFleet
from doll.provisioner.traces.market import MarketClock, SpotMarket
from doll.provisioner.traces.model import constant
from fake_fleet import VirtualClock
from paths import SUPPORT
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.slow  # starts servers


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server with nothing heavy loaded, whose children find the sample roles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        with ForkServer(tmp_path_factory.mktemp("fork") / "server.log", preload=["json"]) as server:
            yield server


@dataclass
class Box:
    """A fleet and what a test needs around it."""

    fleet: ProcessFleet
    clock: VirtualClock
    opening: MarketClock
    folder: Path
    again: Callable[[], ProcessFleet]

    def launch(
        self, slot: int = 0, incarnation: int = 1, market: str = "spot", attempt: int = 0, machines: int = 1
    ) -> Instance:
        return self.fleet.launch(Order(slot, incarnation, market, attempt, machines=machines))  # type: ignore[arg-type]

    def machine(self, id_: str) -> Machine:
        return next(machine for machine in self.fleet.machines if machine.instance.id == id_)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for processes, not for the fleet's clock."""

        def polled() -> bool:
            self.fleet.poll()
            return condition()

        until(polled, what)

    def works(self, id_: str) -> list[str]:
        """Wait until the process has said who it is."""
        self.until((self.folder / id_).exists, f"{id_} to say who it is")
        return (self.folder / id_).read_text().split()

    def ended(self, id_: str) -> Machine:
        self.until(lambda: self.machine(id_).instance.state is InstanceState.ENDED, f"the end of {id_}")
        return self.machine(id_)


@pytest.fixture
def make(forks: ForkServer, tmp_path: Path) -> Iterator[Callable[..., Box]]:
    made: list[Box] = []

    def make_box(
        *spans: tuple[bool, float],
        obeys: bool = True,
        boot_s: float = 0.0,
        no_notice_share: float = 0.0,
        slots: int = 2,
        opened: bool = True,
    ) -> Box:
        clock, opening = VirtualClock(), MarketClock()
        market = SpotMarket(
            [itertools.cycle(spans) for _ in range(slots)], constant(0.1, 0, 1), 0.3, name="box", alpha=0.5,
            notice_s=5.0, no_notice_share=no_notice_share,
        )  # fmt: skip
        if opened:
            opening.open(clock())

        def spec(instance: Instance) -> RoleSpec:
            log = tmp_path / f"worker-{instance.slot}.log"
            return RoleSpec("", "role_samples:be_a_worker", log, [str(tmp_path), obeys])

        def fleet() -> ProcessFleet:
            return ProcessFleet(
                forks, spec, tmp_path, market=market if spans else None, market_clock=opening, boot_s=boot_s,
                drain_s=4.0, clock=clock,
            )  # fmt: skip

        made.append(Box(fleet(), clock, opening, tmp_path, fleet))
        return made[-1]

    yield make_box
    for box in made:
        box.fleet.terminate([machine.instance.id for machine in box.fleet.machines])
        box.clock.advance(60.0)  # a process that ignores SIGTERM is killed
        assert box.fleet.wait_until_ended(WAIT_TIMEOUT_S)


def test_a_launch_is_a_process_that_knows_who_it_is(make: Callable[..., Box]) -> None:
    box = make((True, math.inf))
    instance = box.launch(slot=1, incarnation=7)
    assert (instance.slot, instance.incarnation, instance.market, instance.pool, instance.state) == (
        1,
        7,
        "spot",
        "box/1",
        InstanceState.RUNNING,
    )
    assert instance.launched_s == box.clock()
    assert box.works(instance.id) == ["1", "7", instance.id, "spot", "0"]
    assert psutil.pid_exists(box.machine(instance.id).pid or 0)


def test_the_same_order_is_the_same_instance_and_another_attempt_is_not(make: Callable[..., Box]) -> None:
    box = make((True, math.inf))
    instance = box.launch()
    assert box.launch() == instance
    assert box.launch(attempt=1).id != instance.id
    assert len(box.fleet.instances()) == 2


def test_a_machine_boots_and_its_process_knows_for_how_long(make: Callable[..., Box]) -> None:
    box = make((True, math.inf), boot_s=3.0)
    instance = box.launch()
    assert box.works(instance.id)[4] == "3"
    box.clock.advance(2.9)
    assert box.fleet.instances() == [instance]
    assert instance.state is InstanceState.PENDING
    box.clock.advance(0.2)
    assert box.fleet.instances() == [replace(instance, state=InstanceState.RUNNING)]


def test_before_the_market_opens_time_stands_still(make: Callable[..., Box]) -> None:
    box = make((True, 10.0), (False, 10.0), boot_s=3.0, opened=False)
    instance = box.launch()
    assert instance.state is InstanceState.RUNNING
    assert box.works(instance.id)[4] == "0"
    box.clock.advance(1000.0)
    assert box.fleet.instances()[0].notice_s is None
    box.opening.open(box.clock())
    box.clock.advance(10.0)
    assert box.fleet.instances()[0].notice_s == box.clock() + 5.0


def test_spot_is_refused_while_the_slots_market_is_dry_and_on_demand_is_not(make: Callable[..., Box]) -> None:
    box = make((False, 10.0), (True, 10.0))
    with pytest.raises(LaunchError) as caught:
        box.launch()
    assert (caught.value.failure, caught.value.pools) == (LaunchFailure.CAPACITY, frozenset({"box/0"}))
    assert box.fleet.instances() == []
    assert box.launch(market="on_demand").is_alive
    box.clock.advance(10.0)
    assert box.launch().is_alive
    with pytest.raises(LaunchError, match="expected a slot of 0 to 1, got 2"):
        box.launch(slot=2)


def test_a_pool_to_avoid_is_avoided(make: Callable[..., Box]) -> None:
    box = make((True, math.inf))
    with pytest.raises(LaunchError) as caught:
        box.fleet.launch(Order(0, 1, "spot", 0, frozenset({"box/0"})))
    assert caught.value.failure is LaunchFailure.CAPACITY


def test_a_worker_that_is_told_leaves_within_its_notice(make: Callable[..., Box]) -> None:
    box = make((True, 10.0), (False, 10.0))
    instance = box.launch()
    box.works(instance.id)
    box.clock.advance(9.9)
    assert box.fleet.instances()[0].notice_s is None
    box.clock.advance(0.2)
    assert box.fleet.instances()[0].notice_s == pytest.approx(instance.launched_s + 15.0)
    ended = box.ended(instance.id)
    assert (ended.instance.end_reason, ended.instance.ended_s) == (EndReason.INTERRUPTED, box.clock())
    assert (ended.exit_code, ended.killed, ended.preempted) == (0, False, True)
    with pytest.raises(LaunchError):
        box.launch(incarnation=2)


def test_a_worker_that_stays_is_killed_when_the_notice_is_over(make: Callable[..., Box]) -> None:
    box = make((True, 10.0), (False, 10.0), obeys=False)
    instance = box.launch()
    box.works(instance.id)
    box.clock.advance(14.9)
    noticed = box.fleet.instances()[0]
    assert noticed.is_alive
    assert noticed.notice_s is not None
    box.clock.advance(0.2)
    ended = box.ended(instance.id)
    assert (ended.instance.end_reason, ended.exit_code, ended.killed) == (EndReason.INTERRUPTED, -signal.SIGKILL, True)


def test_a_surprise_is_sigkill_without_a_word(make: Callable[..., Box]) -> None:
    box = make((True, 10.0), (False, 10.0), no_notice_share=1.0)
    instance = box.launch()
    box.works(instance.id)
    box.clock.advance(10.0)
    ended = box.ended(instance.id)
    assert ended.instance.notice_s is None
    assert (ended.instance.end_reason, ended.exit_code, ended.without_notice) == (
        EndReason.INTERRUPTED,
        -signal.SIGKILL,
        True,
    )


def test_a_machine_that_is_taken_while_it_boots_is_told_too(make: Callable[..., Box]) -> None:
    box = make((True, 10.0), (False, 10.0), boot_s=30.0)
    instance = box.launch()
    box.works(instance.id)
    box.clock.advance(10.0)
    assert box.fleet.instances()[0].notice_s is not None
    ended = box.ended(instance.id)
    assert (ended.instance.end_reason, ended.exit_code) == (EndReason.INTERRUPTED, 0)


@pytest.mark.parametrize(("obeys", "code"), [(True, 0), (False, -signal.SIGKILL)])
def test_to_terminate_is_to_tell_and_then_to_kill(make: Callable[..., Box], obeys: bool, code: int) -> None:
    box = make((True, math.inf), obeys=obeys)
    instance = box.launch(market="on_demand")
    box.works(instance.id)
    box.fleet.terminate([instance.id, "unknown"])
    assert box.fleet.instances()[0].state in (InstanceState.ENDING, InstanceState.ENDED)
    if not obeys:
        box.clock.advance(5.0)  # the time to drain, and one second
    ended = box.ended(instance.id)
    assert (ended.instance.end_reason, ended.exit_code, ended.preempted) == (EndReason.TERMINATED, code, False)
    box.fleet.terminate([instance.id])
    assert box.fleet.instances()[0].end_reason is EndReason.TERMINATED


def test_a_worker_that_ends_by_itself_has_failed_and_nobody_starts_it_again(make: Callable[..., Box]) -> None:
    box = make()
    instance = box.launch()
    box.works(instance.id)
    psutil.Process(box.machine(instance.id).pid).kill()
    ended = box.ended(instance.id)
    assert (ended.instance.end_reason, ended.exit_code) == (EndReason.FAILED, -signal.SIGKILL)
    box.clock.advance(3600.0)
    assert len(box.fleet.instances()) == 1
    box.clock.advance(1.0)
    assert box.fleet.instances() == []


def test_a_process_stands_for_all_machines_of_its_worker(make: Callable[..., Box]) -> None:
    """The process is billed as k machines, also after a crash of the controller, and its end is the end of all k."""
    box = make((True, 30.0), (False, 30.0))
    gang, one = box.launch(machines=3), box.launch(slot=1, market="on_demand")
    assert (gang.machines, one.machines) == (3, 1)
    box.works(gang.id)
    box.works(one.id)
    box.fleet = box.again()
    assert {instance.id: instance.machines for instance in box.fleet.instances()} == {gang.id: 3, one.id: 1}
    box.clock.advance(31.0)  # one of its machines is taken: the process is told to leave, with all of them
    ended = box.ended(gang.id).instance
    assert (ended.end_reason, ended.machines) == (EndReason.INTERRUPTED, 3)
    box.clock.advance(9.0)
    bought = bill(box.fleet.instances(), lambda *_: constant(3600.0, 0, 1), LOCAL, box.clock())
    assert bought.usd == pytest.approx(3 * 31.0 + 40.0)
    assert bought.hours_by_market == pytest.approx({"spot": 93.0 / 3600, "on_demand": 40.0 / 3600})


def test_after_a_crash_of_the_controller_its_instances_are_there(make: Callable[..., Box]) -> None:
    box = make((True, 100.0), (False, 10.0), boot_s=3.0)
    runs, dead = box.launch(), box.launch(slot=1)
    box.clock.advance(3.0)
    box.works(runs.id)
    box.works(dead.id)
    boots = box.launch(slot=1, incarnation=2)
    psutil.Process(box.machine(dead.id).pid).kill()
    box.ended(dead.id)
    before = box.fleet.instances()
    box.fleet = box.again()  # the old object is gone, without a word
    assert box.fleet.instances() == before
    assert [instance.state for instance in before] == [
        InstanceState.RUNNING,
        InstanceState.ENDED,
        InstanceState.PENDING,
    ]
    assert box.fleet.launch(Order(0, 1, "spot")).id == runs.id
    box.clock.advance(3.0)
    box.works(boots.id)
    # It can still be told, and its notice still comes.
    box.fleet.terminate([boots.id])
    assert box.ended(boots.id).exit_code == 0
    box.clock.advance(94.0)
    assert box.ended(runs.id).instance.end_reason is EndReason.INTERRUPTED


def test_instances_of_a_parent_that_was_killed_have_ended(make: Callable[..., Box], tmp_path: Path) -> None:
    box = make()
    instance = box.launch()
    box.works(instance.id)
    with ForkServer(tmp_path / "other.log", preload=["json"]) as other:
        fleet = ProcessFleet(other, lambda _: RoleSpec("", "", tmp_path / "log"), tmp_path, clock=box.clock)
        assert [(listed.id, listed.end_reason) for listed in fleet.instances()] == [(instance.id, EndReason.FAILED)]


def test_a_file_that_cannot_be_read_is_told(make: Callable[..., Box], tmp_path: Path) -> None:
    box = make()
    box.launch()
    (tmp_path / "instances.json").write_text('[{"instance": {}}]')
    with pytest.raises(ConfigError, match=r"instances\.json: expected the instances of this run"):
        box.again()
