"""A group that the live workers cannot fill is told, not waited for in silence (digest 5.4)."""

from __future__ import annotations

from collections.abc import Sequence

from doll.config import StopConfig
from doll.ps import events as ev
from doll.ps.engine import Engine, EngineSettings
from doll.ps.policies import Doll
from doll.ps.stuck import PATIENCE_S, Stuck, shortfall
from doll.records import Announce, Join, Leave, Push


class Bench:
    """Two workers that may hold three batches each, and groups of five."""

    def __init__(self, group_size: int = 5) -> None:
        settings = EngineSettings(
            num_workers=2, records_per_batch=1, max_pending_batches=3, lease_s=8.0, grant_timeout_s=30.0,
            checkpoint_every_updates=1, checkpoint_every_s=1000.0, stop=StopConfig(),
        )  # fmt: skip
        self.engine = Engine(settings, Doll(group_size), ps_epoch=1, now=0.0, origins=(0, 0))
        self.epochs: dict[int, int] = {}
        for worker in (0, 1):
            self.join(worker)

    def join(self, worker: int, instance: str = "a") -> None:
        for action in self.tell(Join(worker=worker, instance=f"{instance}{worker}")):
            if isinstance(action, ev.SendWelcome):
                self.epochs[worker] = action.epoch

    def announce(self, worker: int, until: int) -> list[ev.SendGrant]:
        found = self.tell(Announce(worker=worker, epoch=self.epochs[worker], first=0, until=until))
        return [action for action in found if isinstance(action, ev.SendGrant)]

    def push(self, grants: Sequence[ev.SendGrant]) -> None:
        for grant in grants:
            self.tell(
                Push(
                    worker=grant.worker, epoch=grant.epoch, token=grant.token, ps_epoch=1, grant=grant.grant,
                    version=grant.version, key="", n_samples=0, loss_sum=0.0,
                )
            )  # fmt: skip

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.engine.handle(event, 1.0)
        self.engine.check_invariants()
        return actions


def test_waiting_for_data_is_not_being_stuck() -> None:
    bench = Bench()
    assert shortfall(bench.engine) == 0
    bench.announce(0, 3)
    assert shortfall(bench.engine) == 0  # the other may still announce three


def test_a_group_larger_than_what_one_worker_can_hold_needs_the_other() -> None:
    bench = Bench()
    bench.announce(0, 3)
    bench.tell(Leave(worker=1, epoch=bench.epochs[1], cause="sigterm"))
    assert shortfall(bench.engine) == 2
    bench.join(1, "b")
    assert shortfall(bench.engine) == 0
    assert len(bench.announce(1, 2)) == 5  # and on it goes


def test_a_group_under_way_counts_what_it_has() -> None:
    bench = Bench()
    bench.announce(0, 3)
    grants = bench.announce(1, 3)
    mine = [grant for grant in grants if grant.worker == 0]
    bench.push(mine)
    assert shortfall(bench.engine) == 0
    bench.tell(Leave(worker=1, epoch=bench.epochs[1], cause="sigterm"))
    assert len(mine) == 3
    assert bench.engine.num_held == 3
    assert shortfall(bench.engine) == 2  # worker 0 is full: its three are held in the group


def test_what_is_in_the_model_makes_room() -> None:
    bench = Bench(group_size=3)
    bench.push(bench.announce(0, 3))
    assert bench.engine.version == 1
    bench.tell(Leave(worker=1, epoch=bench.epochs[1], cause="sigterm"))
    assert shortfall(bench.engine) == 0


def test_it_is_told_once_when_it_lasts_and_again_when_it_comes_back() -> None:
    bench = Bench()
    stuck = Stuck(now=0.0)
    bench.tell(Leave(worker=1, epoch=bench.epochs[1], cause="sigterm"))
    assert stuck.look(bench.engine, PATIENCE_S / 2) is None
    told = stuck.look(bench.engine, PATIENCE_S)
    assert told is not None
    assert "2 batches more" in told
    assert "1 of 2 workers" in told
    assert stuck.look(bench.engine, 2 * PATIENCE_S) is None
    bench.join(1, "b")
    assert stuck.look(bench.engine, 3 * PATIENCE_S) is None
    assert stuck.lasted_s(3 * PATIENCE_S) == 0
    bench.tell(Leave(worker=1, epoch=bench.epochs[1], cause="sigterm"))
    assert stuck.look(bench.engine, 3.5 * PATIENCE_S) is None
    assert stuck.look(bench.engine, 4 * PATIENCE_S) is not None
