"""A job of two provisioners that die, freeze, and lose answers or the store, in a market at its worst, from one seed.

A provisioner that freezes in the middle of a call does so in its caller's stack: the world, and the other provisioner,
go on within that call, which then returns. So a run is the same each time, without threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
from crash_scenario import DEADLINE_S, LAG_S, STEP_S, Crash
from doll.errors import CheckpointError, FencedError
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import Instance, InstanceState, LaunchFailure, Order
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.lease import Lease, LeaseWatch, holder_of
from doll.provisioner.state_store import FileStateStore, SharedStateStore
from doll.storage.checkpoints import CheckpointStore
from fake_fleet import FakeFleet, VirtualClock
from job_world import ON_DEMAND, SPOT, FlatPrices, JobWorld, settings

LEASE_S = 30.0


class Host:
    """A machine that runs a provisioner: what it reaches, and what happens to it.

    Attributes:
        is_cut_off: the store does not answer it; the fleet does.
        late: calls of the fleet that launch or end, which it has made since another has taken over.
    """

    def __init__(self, scenario: StandbyScenario, name: str) -> None:
        self.scenario, self.name = scenario, name
        self.is_cut_off = False
        self.late: list[str] = []
        self.controller: Controller | None = None
        self.lease: Lease | None = None
        self.watch: LeaseWatch | None = None
        self.journal: list[dict[str, Any]] = []
        self._launched: set[str] = set()
        self._fuse, self._action, self._kind = -1, "", ""

    def light(self, effects: int, action: str, kind: str) -> None:
        """At the so many-th effect of this kind from now: die or freeze, before it or after it."""
        self._fuse, self._action, self._kind = effects, action, kind

    def effect(self, kind: str, call: Callable[[], Any]) -> Any:
        if self._kind in ("", kind):
            self._fuse -= 1
        if self._fuse or self._kind not in ("", kind):
            return call()
        what, _, when = self._action.partition(" ")
        act = self._die if what == "die" else lambda: self.scenario.meanwhile(self)
        if when == "before":
            act()
        result = call()
        if when == "after":
            act()
        return result

    def _die(self) -> None:
        raise Crash

    # --- the store

    location = "the store of the test"

    def _ask(self, kind: str, call: Callable[[], Any]) -> Any:
        if self.is_cut_off:
            raise CheckpointError("the store does not answer this machine")
        return self.effect(kind, call)

    def claim_term(self, above: int = 0) -> int:
        return int(self._ask("claim", self.scenario.store.claim_term))

    def newest_term(self) -> int:
        return int(self._ask("look", self.scenario.store.newest_term))

    def read_document(self, name: str) -> Any:
        return self._ask("read", lambda: self.scenario.store.read_document(name))

    def replace_document(self, name: str, data: bytes, known: Any) -> Any:
        known = self._ask("save", lambda: self._replace(name, data, known))
        if self.scenario.rng.random() < self.scenario.lost_answers:
            if self.scenario.rng.random() < 0.5:
                raise CheckpointError("the answer was lost")
            return None  # as the adapter's own retry says
        return known

    def _replace(self, name: str, data: bytes, known: Any) -> Any:
        before = self.scenario.store.read_document(name)[0]
        done = self.scenario.store.replace_document(name, data, known)
        if done is not None and before is not None:
            owner, writer = (msgspec.json.decode(content)["provisioner"] for content in (before, data))
            assert owner <= writer, f"{name} of provisioner {owner} is replaced by {writer}, which is over"
        return done

    # --- the fleet

    def launch(self, order: Order) -> Instance:
        made: Instance = self.effect("launch", lambda: self._order("launch", lambda: self.scenario.fleet.launch(order)))
        self._launched.add(made.id)
        return made

    def instances(self) -> Sequence[Instance]:
        now_s = self.scenario.clock()
        return [
            item
            for item in self.effect("list", self.scenario.fleet.instances)
            if item.id in self._launched or now_s - item.launched_s >= LAG_S
        ]

    def terminate(self, ids: Collection[str]) -> None:
        self.effect("end", lambda: self._order("end", lambda: self.scenario.fleet.terminate(ids)))

    def close(self) -> None:
        pass

    def _order(self, kind: str, call: Callable[[], Any]) -> Any:
        if self is not self.scenario.owner:
            self.late.append(kind)
        assert not self.is_cut_off, "an order of one that cannot see whether the lease is its own"
        return call()

    # --- the process

    def start(self) -> None:
        """Take over, as `ProvisionerProcess` does."""
        self.lease = Lease(cast("CheckpointStore", self), LEASE_S, clock=self.scenario.clock)
        store = SharedStateStore(cast("CheckpointStore", self), _Journal(self.journal), self.lease.number)
        self.lease.renew()
        store.take()
        self.scenario.owner = self
        self.late = []
        self.controller = Controller(
            self.scenario.job, self, FlatPrices(), LOCAL, store, check_lease=self.lease.check, job="t",
        )  # fmt: skip

    def turn(self, *, draining: bool = False) -> Decision:
        assert self.controller is not None
        assert self.lease is not None
        self.scenario.world.tell(self.controller)
        decision = self.controller.turn(self.scenario.clock(), draining=draining)
        if not self.is_cut_off:
            with suppress(CheckpointError):
                self.lease.renew_if_due()
        return decision


class _Journal(FileStateStore):
    """The journal in memory; no earlier state."""

    def __init__(self, journal: list[dict[str, Any]]) -> None:
        super().__init__(Path("nowhere"), "t")
        self._entries = journal

    def load(self) -> None:
        return None

    def append(self, entry: Mapping[str, Any]) -> None:
        self._entries.append(dict(entry))


class StandbyScenario:
    """One job from its start to its drain.

    Args:
        faults: how many deaths, freezes and cuts there are.
        wild: the market interrupts, dries up, throttles and loses answers.

    Attributes:
        owner: the provisioner that took over last.
        thawed: how many went on after another had taken over.
        longest_freeze: whoever freezes does so until the job has ended.
    """

    def __init__(self, seed: int, store: CheckpointStore, *, faults: int, wild: bool = True) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.fleet = FakeFleet(self.clock, boot_s=20.0, ending_s=5.0)
        self.job = settings(deadline_s=DEADLINE_S, limits=LaunchLimits(pool_backoff_s=30.0, early_s=20.0))
        self.world = JobWorld(self.clock, self.fleet, self.job)
        self.store = store
        self.faults_left = faults
        self.faults: list[str] = []
        self.lost_answers = 0.03 if wild else 0.0
        self.decisions: list[Decision] = []
        self.draining = False
        self.ended = False
        self.thawed = 0
        self.longest_freeze = False
        self._wild = wild
        self._names = 0
        self.owner: Host = self._host()
        self.world.pass_time(0.0)
        self._start(self.owner)

    def _host(self) -> Host:
        self._names += 1
        return Host(self, f"host-{self._names}")

    def _start(self, host: Host) -> None:
        """Start it, again where the store has lost an answer."""
        while True:
            try:
                host.start()
                return
            except CheckpointError:
                pass

    def pass_time(self) -> None:
        self.clock.advance(STEP_S)
        if self._wild:
            self.market()
        self.world.pass_time(STEP_S)

    def take_over(self) -> Host:
        """Another one waits until the lease is over, and takes over."""
        successor = self._host()
        watch = LeaseWatch(LEASE_S, self.clock())
        began_s = self.clock()
        while watch.look(holder_of(self.store), self.clock()) != "over":
            self.pass_time()
            assert self.clock() - began_s <= 2 * LEASE_S, "nobody renews it"
        self._start(successor)
        return successor

    def meanwhile(self, frozen: Host) -> None:
        """What happens while a provisioner is frozen in the middle of a call."""
        self.thawed += 1
        self.take_over()
        for _ in range(300 if self.longest_freeze else self.rng.choice([0, 1, 3, 10, 80])):
            if self.ended:
                break
            self.pass_time()
            self.step()

    def step(self) -> None:
        """One turn of the owner, with a fault now and then."""
        host, rng = self.owner, self.rng
        fault = self.faults_left and rng.random() < 0.3
        if fault:
            self.faults_left -= 1
            self.faults.append(rng.choice(["die before", "die after", "freeze before", "freeze after", "cut off"]))
            if self.faults[-1] == "cut off":
                self._cut_off(host)
                return
            kind = rng.choice(["", "save", "launch", "end"])
            host.light(rng.randint(1, 12) if kind == "" else rng.randint(1, 3), self.faults[-1], kind)
        try:
            decision = host.turn(draining=self.draining)
        except Crash:
            self.take_over()
            return
        except FencedError:
            assert self.owner is not host
        except CheckpointError:  # its first save lost its answer: the process ends
            self.take_over()
            return
        else:
            if self.owner is host:
                self.decisions.append(decision)
                self.ended = decision.finished
        host.light(-1, "", "")
        if self.owner is not host:
            self._check_fenced(host)

    def _cut_off(self, host: Host) -> None:
        """It reaches the fleet, and not the store, until after another has taken over."""
        host.is_cut_off = True
        orders = len([call for call in self.fleet.calls if call.name != "instances"])
        for _ in range(3):
            try:
                decision = host.turn(draining=self.draining)
            except CheckpointError:
                break
            assert decision.phase == "unavailable"
            self.pass_time()
        assert orders == len([call for call in self.fleet.calls if call.name != "instances"])
        self.take_over()
        host.is_cut_off = False
        self._check_fenced(host)

    def _check_fenced(self, host: Host) -> None:
        """One that was frozen or cut off does no more than the call that it was in, and what ends its effect."""
        while True:
            try:
                host.turn(draining=self.draining)
            except FencedError:
                break
            except CheckpointError:
                continue
            raise AssertionError("it must have seen that another has taken over")
        assert host.late in ([], ["launch"], ["end"], ["launch", "end"]), host.late
        host.late = []

    def market(self) -> None:
        """What the owner of the machines does to us."""
        rng, fleet = self.rng, self.fleet
        for instance in fleet.alive():
            if instance.market == "spot" and instance.notice_s is None and rng.random() < 0.03:
                fleet.interrupt(instance.id, rng.choice([0.0, 30.0]))
        for pool in fleet.pools:
            if rng.random() < 0.05:
                fleet.set_capacity(pool, "spot", rng.choice([0, 1, None, None]))
        if rng.random() < 0.05:
            fleet.lose_next_response()
        if rng.random() < 0.05:
            fleet.fail_next("launch", rng.choice([LaunchFailure.THROTTLED, LaunchFailure.CAPACITY]))
        if rng.random() < 0.03:
            fleet.become_unavailable()

    def play(self, turns: int = 300) -> None:
        """To the end of the job; then what is left is drained."""
        for _ in range(turns):
            self.step()
            if self.ended:
                break
            self.pass_time()
        if self.ended:
            alive = [item.id for item in self.fleet.alive()]
            assert alive == [], "no machine is left by the one that has ended the job, nor by one that woke up later"
        self.draining, self.ended = True, False
        for _ in range(60):
            self.step()
            if self.ended and not self.faults_left:
                break
            self.pass_time()

    def check(self) -> None:
        """What must hold of every scenario."""
        instances = self.fleet.all_instances()
        left = [instance for instance in instances if instance.state is not InstanceState.ENDED]
        assert left == [], "no machine is left"
        assert self.world.most_per_slot <= 2, "never more than make-before-break"
        names = {(instance.slot, instance.incarnation) for instance in instances}
        assert len(names) == len(instances), "an incarnation is one machine"
        bill = self.decisions[-1].bill
        assert bill.instances == len(instances), "each machine is on the bill once"
        usd_per_h = {"spot": SPOT, "on_demand": ON_DEMAND}
        expected = sum(
            ((instance.ended_s or 0.0) - instance.launched_s) / 3600 * usd_per_h[instance.market]
            for instance in instances
        )
        assert abs(bill.usd - expected) < 1e-6 + 1e-6 * expected, (bill.usd, expected)
