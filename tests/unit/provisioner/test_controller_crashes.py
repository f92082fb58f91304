"""A controller that is killed between any two side effects, in a market at its worst: nothing is lost or doubled."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from doll.provisioner.controller import Controller, ControllerSettings, Decision
from doll.provisioner.fleets.fake import FakeFleet, VirtualClock
from doll.provisioner.fleets.port import Instance, InstanceState, Order, Trouble
from doll.provisioner.reconcile import Limits
from doll.provisioner.state_store import MemoryBook
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from job_world import FlatPrices, JobWorld, settings

STEP_S = 10.0
LAG_S = 25.0
DEADLINE_S = 500.0  # 250 s of work


class Crash(BaseException):
    """The controller's process is gone."""


class Fuse:
    """Counts side effects and blows at the chosen one, before it or after it."""

    def __init__(self) -> None:
        self.left = -1
        self.after = False

    def light(self, effects: int, *, after: bool) -> None:
        self.left, self.after = effects, after

    def burn(self, effect: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Crash
        result = effect()
        if self.left == 0 and self.after:
            raise Crash
        return result


class FusedFleet:
    """A fleet whose caller may die at each call, and must not end what works or has its notice.

    Its owner's listing lags behind: what this handle has not launched itself shows up after `LAG_S`.
    """

    def __init__(self, fleet: FakeFleet, fuse: Fuse, story: Story) -> None:
        self._fleet, self._fuse, self._story = fleet, fuse, story
        self._launched: set[str] = set()

    def launch(self, order: Order) -> Instance:
        made: Instance = self._fuse.burn(lambda: self._fleet.launch(order))
        self._launched.add(made.id)
        return made

    def instances(self) -> Sequence[Instance]:
        now_s = self._story.clock()
        return [one for one in self._fleet.instances() if one.id in self._launched or now_s - one.launched_s >= LAG_S]

    def terminate(self, ids: Collection[str]) -> None:
        for one in self._fleet.alive():
            if one.id in ids:
                assert one.notice_s is None, "what has its notice is left to its owner"
                assert self._story.ending or not self._story.world.works(one), "broken before the next was made"
        self._fuse.burn(lambda: self._fleet.terminate(ids))

    def close(self) -> None:
        pass


class FusedBook(MemoryBook):
    """A book whose writer may die at each writing."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def save(self, kept: Mapping[str, Any]) -> None:
        self._fuse.burn(lambda: MemoryBook.save(self, kept))

    def note(self, entry: Mapping[str, Any]) -> None:
        self._fuse.burn(lambda: MemoryBook.note(self, entry))


class Story:
    """One job from its start to its drain, with crashes and a market, all from one seed.

    Args:
        crashes: how many times the controller dies.
        wild: the market interrupts, dries up, throttles and loses answers.
        forget: the book is lost at a crash now and then.
    """

    def __init__(
        self, seed: int, *, crashes: int, wild: bool = True, forget: bool = False, job: ControllerSettings | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.fleet = FakeFleet(self.clock, boot_s=20.0, ending_s=5.0)
        self.job = job or settings(deadline_s=DEADLINE_S, limits=Limits(bad_pool_s=30.0, early_s=20.0))
        self.world = JobWorld(self.clock, self.fleet, self.job)
        self.fuse = Fuse()
        self.book = FusedBook(self.fuse)
        self.crashes_left = crashes
        self.crashes = 0
        self.decisions: list[Decision] = []
        self._wild, self._forget = wild, forget
        self.draining = False
        self.controller = self._start()

    def _start(self) -> Controller:
        return Controller(self.job, FusedFleet(self.fleet, self.fuse, self), FlatPrices(), self.book)

    @property
    def ending(self) -> bool:
        """The job has ended, or is drained."""
        return self.draining or self.world.finished_s is not None

    def turn(self, *, draining: bool = False) -> Decision:
        """One turn, by as many controllers as it takes."""
        self.draining = draining
        if self.crashes_left and self.rng.random() < 0.5:
            self.fuse.light(self.rng.randint(1, 12), after=self.rng.random() < 0.5)
        while True:
            try:
                self.world.tell(self.controller)
                decision = self.controller.turn(self.clock(), draining=draining)
                self.decisions.append(decision)
                self.fuse.left = -1
                return decision
            except Crash:
                self.crashes += 1
                self.crashes_left -= 1
                self.fuse.left = -1
                if self._forget and self.rng.random() < 0.5:
                    journal, self.book = self.book.journal, FusedBook(self.fuse)
                    self.book.journal = journal
                self.controller = self._start()

    def market(self) -> None:
        """What the owner of the machines does to us."""
        rng, fleet = self.rng, self.fleet
        for one in fleet.alive():
            if one.market == "spot" and one.notice_s is None and rng.random() < 0.04:
                fleet.interrupt(one.id, rng.choice([0.0, 30.0]))
            elif rng.random() < 0.002:
                fleet.break_down(one.id)
        for pool in ("c5.xlarge/zone-a", "m5.xlarge/zone-a", "c5.xlarge/zone-b", "m5.xlarge/zone-b"):
            if rng.random() < 0.1:
                fleet.set_room(pool, "spot", rng.choice([0, 0, 1, None]))
        if rng.random() < 0.05:
            fleet.lose_answer_next()
        if rng.random() < 0.05:
            fleet.fail_next("launch", rng.choice([Trouble.THROTTLED, Trouble.CAPACITY, Trouble.SPOT_QUOTA]))
        if rng.random() < 0.03:
            fleet.go_away()

    def play(self, turns: int = 200) -> None:
        """To the end of the job."""
        self.world.pass_time(0.0)
        for _ in range(turns):
            if self.turn().over:
                return
            self.clock.advance(STEP_S)
            if self._wild:
                self.market()
            self.world.pass_time(STEP_S)

    def drain(self, turns: int = 40) -> None:
        for _ in range(turns):
            if self.turn(draining=True).over:
                return
            self.clock.advance(STEP_S)
            self.world.pass_time(STEP_S)

    def check(self) -> None:
        """What must hold of every story."""
        fleet, journal = self.fleet, self.book.journal
        assert [one for one in fleet.everything() if one.state is not InstanceState.ENDED] == [], "no orphans"
        assert self.world.most_per_slot <= 2, "never more than make-before-break"
        noted = {
            (one["slot"], one["epoch"], one["market"], one["attempt"]) for one in journal if one["kind"] == "order"
        }
        for call in fleet.calls:
            if call.order is not None:
                order = call.order
                assert (order.slot, order.epoch, order.market, order.attempt) in noted, "each launch is in the journal"
        ended = {one["id"] for one in journal if one["kind"] == "end"}
        assert {id_ for call in fleet.calls for id_ in call.ids} <= ended, "and each end"
        instances = fleet.everything()
        assert len({(one.slot, one.epoch) for one in instances}) == len(instances), "an epoch is one machine"


@given(st.integers(0, 2**32))
@hypothesis_settings(max_examples=25, deadline=None)
def test_any_crash_in_any_market(seed: int) -> None:
    story = Story(seed, crashes=20)
    story.play()
    story.drain()
    story.check()


@given(st.integers(0, 2**32))
@example(2185)
@example(24174)
@example(1_888_673_432)  # a launch whose answer was lost in the last turn before the job's end
@hypothesis_settings(max_examples=10, deadline=None)
def test_any_crash_with_the_book_lost_now_and_then(seed: int) -> None:
    story = Story(seed, crashes=20, forget=True)
    story.play()
    story.drain()
    story.check()


@pytest.mark.parametrize("seed", range(5))
def test_no_orphans_after_twenty_crashes_in_mid_run(seed: int) -> None:
    """The bar: 20 crashes, and the job is drained long before its end."""
    story = Story(seed, crashes=20)
    turns = 0
    story.world.pass_time(0.0)
    while story.crashes < 20 and turns < 400:
        story.turn()
        story.clock.advance(STEP_S)
        story.market()
        story.world.pass_time(STEP_S if turns < 10 else 0.0)  # it does not finish by itself
        turns += 1
    assert story.crashes == 20
    story.drain()
    story.check()
    assert story.decisions[-1].phase == "drain"


@given(st.integers(0, 2**32))
@hypothesis_settings(max_examples=15, deadline=None)
def test_crashes_cost_no_deadline_and_no_money(seed: int) -> None:
    """In a calm market a controller that crashes does as one that does not: deadline and bill are the same."""
    calm, crashed = Story(seed, crashes=0, wild=False), Story(seed, crashes=20, wild=False)
    for story in (calm, crashed):
        story.play()
        story.check()
        assert story.world.finished_s is not None
        assert story.world.finished_s - story.decisions[0].started_s <= DEADLINE_S
    assert crashed.decisions[-1].bill.usd == pytest.approx(calm.decisions[-1].bill.usd, rel=0.02)
    assert crashed.decisions[-1].bill.instances == calm.decisions[-1].bill.instances
