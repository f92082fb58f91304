"""Random faults on each fleet, one after the other: no machine is there twice, forgotten, or billed after its end.

`DOLL_FLEET_FAULTS` says how many on each; `DOLL_FLEET_SEED` makes a sequence again.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from doll.errors import FencedError, ServiceUnavailableError
from doll.provisioner.billing import LOCAL, bill
from doll.provisioner.fleets.port import EndReason, Instance, LaunchError, LaunchFailure, Order
from doll.provisioner.lease import Lease
from doll.provisioner.planning.state import Market
from doll.provisioner.prices.port import StatedPrices
from doll.storage.file_checkpoints import FileCheckpointStore
from fleet_rigs import RIGS, Rig, end_clusters, refused

pytestmark = pytest.mark.slow

FAULTS = int(os.environ.get("DOLL_FLEET_FAULTS", "12"))
SEED = int(os.environ.get("DOLL_FLEET_SEED", "1"))
SLOTS = 3
MOST_ALIVE = 4
HOUR_S = 3600.0
USD_PER_H = {"spot": 1.0, "on_demand": 3.0}


@pytest.fixture(scope="module", autouse=True)
def _clusters() -> Iterator[None]:
    yield
    end_clusters()


class Provisioner:
    """What a provisioner knows of its machines, and the faults that come to it."""

    def __init__(self, rig: Rig, claims: FileCheckpointStore, seed: int) -> None:
        self.rig = rig
        self.claims = claims
        self.random = random.Random(seed)
        self.alive: dict[str, Order] = {}
        self.ended: dict[str, Instance] = {}
        self.seen: dict[str, Instance] = {}
        self.seen_by = rig.fleet
        self.incarnations: Counter[int] = Counter()
        self.prices = StatedPrices(USD_PER_H["spot"], USD_PER_H["on_demand"])

    def faults(self) -> dict[str, Callable[[], None]]:
        """By name, what this fleet's world can do."""
        of_abilities = {
            "dry": [self.no_capacity], "starve": [self.no_node], "quota": [self.quota], "throttle": [self.throttled],
            "lose_answer": [self.lost_answer, self.lost_answer_and_restart], "away": [self.no_answer],
            "interrupt": [self.notice, self.no_notice], "stop": [self.stopped],
        }  # fmt: skip
        always = [
            self.ordered_twice, self.ordered_again_after_restart, self.machine_gone, self.drained, self.orphan,
            self.restart, self.two_provisioners,
        ]  # fmt: skip
        world = [fault for ability in sorted(self.rig.can) for fault in of_abilities.get(ability, [])]
        return {fault.__name__: fault for fault in (*always, *world)}

    def check(self) -> None:
        """What holds after every fault."""
        self.rig.advance(90)
        by_id = self._listed()
        alive = [instance for instance in by_id.values() if instance.is_alive]
        assert {instance.id for instance in alive} == set(self.alive), "neither lost nor left over"
        assert max(Counter((each.slot, each.incarnation) for each in alive).values(), default=1) == 1
        for instance in alive:
            order = self.alive[instance.id]
            assert (instance.slot, instance.incarnation, instance.market) == (
                order.slot, order.incarnation, order.market,
            )  # fmt: skip
            assert instance.id not in self.ended, "nobody rises from the dead"
        if self.seen_by is not self.rig.fleet:  # one that starts may see an end later; a provisioner keeps the first
            self.seen_by, self.seen = self.rig.fleet, {}
        for instance in by_id.values():
            if instance.ended_s is not None:
                assert self.seen.setdefault(instance.id, instance) == instance, "what has ended does not change"
                self.ended.setdefault(instance.id, instance)
        self.check_bill({**by_id, **self.ended})

    def check_bill(self, by_id: Mapping[str, Instance]) -> None:
        """Each machine once, for the time that it was there; an hour later for those that live, and no others."""
        now_s = self.rig.now_s
        now, later = (
            {line.id: line.usd for line in bill(by_id.values(), self.prices.series, LOCAL, at_s).lines}
            for at_s in (now_s, now_s + HOUR_S)
        )
        assert set(now) == set(by_id)
        for id_, instance in by_id.items():
            more_usd = USD_PER_H[instance.market] * instance.machines if instance.ended_s is None else 0.0
            assert later[id_] - now[id_] == pytest.approx(more_usd, abs=1e-6)

    # --- faults

    def ordered_twice(self) -> None:
        order = self._order()
        first = self._launch(order)
        assert self.rig.fleet.launch(order).id == first.id

    def ordered_again_after_restart(self) -> None:
        order = self._order()
        first = self._launch(order)
        self.rig.crash()
        assert self.rig.fleet.launch(order).id == first.id

    def lost_answer(self) -> None:
        order = self._order()
        self.rig.lose_answer()
        assert refused(self.rig.fleet, order).failure is LaunchFailure.THROTTLED
        self._launch(order)

    def lost_answer_and_restart(self) -> None:
        order = self._order()
        self.rig.lose_answer()
        refused(self.rig.fleet, order)
        self.rig.crash()
        self._launch(order)

    def throttled(self) -> None:
        order = self._order()
        self.rig.throttle()
        assert refused(self.rig.fleet, order).failure is LaunchFailure.THROTTLED
        self._launch(order)

    def no_capacity(self) -> None:
        order = self._order("spot")
        self.rig.run_dry("spot")
        assert refused(self.rig.fleet, order).failure is LaunchFailure.CAPACITY
        self._launch(replace(order, market="on_demand", attempt=1))
        self.rig.recover()

    def no_node(self) -> None:
        order = self._order("spot")
        self.rig.starve()
        made = self.rig.fleet.launch(order)
        self.rig.refuse_node(made.id)
        self.rig.fleet.instances()  # which gives it back
        assert not self._listed()[made.id].is_alive
        again = replace(order, attempt=1)
        assert refused(self.rig.fleet, again).failure is LaunchFailure.CAPACITY
        self.rig.recover()
        self._launch(replace(order, market="on_demand", attempt=2))

    def quota(self) -> None:
        order = self._order("spot")
        self.rig.limit()
        assert refused(self.rig.fleet, order).failure is LaunchFailure.SPOT_QUOTA
        self._launch(replace(order, market="on_demand", attempt=1))
        self.rig.recover()

    def no_answer(self) -> None:
        self.rig.become_unavailable()
        with pytest.raises(ServiceUnavailableError):
            self.rig.fleet.instances()

    def notice(self) -> None:
        self._interrupted(announced=True)

    def no_notice(self) -> None:
        self._interrupted(announced=False)

    def machine_gone(self) -> None:
        instance = self._launch(self._order("on_demand"))
        self.rig.advance(60)
        self._listed()
        self.rig.fail_instance(instance.id)
        self.rig.advance(60)
        assert self._listed()[instance.id].end_reason is EndReason.FAILED
        del self.alive[instance.id]

    def stopped(self) -> None:
        instance = self._launch(self._order("on_demand"))
        self.rig.advance(60)
        self._listed()
        self.rig.stop(instance.id)
        assert self._listed()[instance.id].is_endable
        self.rig.fleet.terminate([instance.id])
        del self.alive[instance.id]

    def drained(self) -> None:
        self.rig.fleet.terminate(list(self.alive))
        self.rig.fleet.terminate(list(self.alive))
        self.alive.clear()

    def orphan(self) -> None:
        """The provisioner dies between the launch and the line that would have noted it."""
        made = self.rig.fleet.launch(order := self._order())
        self.rig.advance(90)
        self.rig.crash()
        unknown = {id_ for id_, each in self._listed().items() if each.is_alive} - set(self.alive)
        assert unknown == {made.id}
        if self.random.random() < 0.5:
            self.alive[made.id] = order
        else:
            self.rig.fleet.terminate(unknown)

    def restart(self) -> None:
        self.rig.advance(90)
        self.rig.crash()

    def two_provisioners(self) -> None:
        """Both order the same; the older one learns that it is over before it acts again."""
        older, first = Lease(self.claims), self.rig.fleet
        self.rig.advance(90)
        self.rig.crash()
        newer, order = Lease(self.claims), self._order()
        made = first.launch(order)
        assert self._launch(order).id == made.id
        with pytest.raises(FencedError):
            older.check()
        newer.check()

    # --- parts of faults

    def _interrupted(self, *, announced: bool) -> None:
        instance = self._launch(self._order("spot"))
        self.rig.advance(600)
        self._listed()
        taken = self.rig.beside(instance.id)
        self.rig.interrupt(instance.id, announced=announced)
        self.rig.advance(10 if announced else 60)
        assert (self._listed()[instance.id].notice_s is not None) is announced
        self.rig.advance(150)
        by_id = self._listed()
        assert by_id[instance.id].end_reason is EndReason.INTERRUPTED
        for id_ in taken:
            assert not by_id[id_].is_alive
            del self.alive[id_]
        self.rig.recover()

    def _order(self, market: Market | None = None) -> Order:
        """An order for a slot; some machine ends before, where there are many."""
        while len(self.alive) >= MOST_ALIVE:
            oldest = next(iter(self.alive))
            self.rig.fleet.terminate([oldest])
            del self.alive[oldest]
        slot = self.random.randrange(SLOTS)
        self.incarnations[slot] += 1
        markets: tuple[Market, ...] = ("spot", "on_demand")
        chosen = self.random.choice(markets)
        return Order(slot, self.incarnations[slot], chosen if market is None else market)

    def _launch(self, order: Order) -> Instance:
        instance = self.rig.fleet.launch(order)
        self.alive[instance.id] = order
        return instance

    def _listed(self) -> dict[str, Instance]:
        instances = self.rig.fleet.instances()
        assert len({instance.id for instance in instances}) == len(instances), "each instance once"
        return {instance.id: instance for instance in instances}


@pytest.mark.parametrize("kind", sorted(RIGS))
def test_random_faults_leave_nothing_double_lost_or_billed_too_long(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with RIGS[kind]() as rig:
        provisioner = Provisioner(rig, FileCheckpointStore(tmp_path, "digits"), SEED)
        faults, done = provisioner.faults(), Counter[str]()
        names = [name for _ in range(FAULTS // len(faults) + 1) for name in provisioner.random.sample(
            sorted(faults), len(faults)
        )][:FAULTS]  # fmt: skip
        for number, name in enumerate(names):
            try:
                faults[name]()
                provisioner.check()
            except (AssertionError, LaunchError) as error:
                error.add_note(f"fault {number + 1}, {name}, after {names[:number]}; DOLL_FLEET_SEED={SEED}")
                raise
            done[name] += 1
        record_property("faults", dict(done))
        rig.fleet.terminate(list(provisioner.alive))
        rig.advance(90)
        assert not [each for each in rig.fleet.instances() if each.is_alive]
        rig.fleet.close()
