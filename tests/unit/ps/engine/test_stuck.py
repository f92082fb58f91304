"""A group that the live workers cannot fill is reported, not waited for in silence."""

from __future__ import annotations

from collections.abc import Sequence

from doll.config import StopConfig
from doll.config.policy import PolicyConfig
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.engine.stopping import STALL_REPORT_S, StallDetector
from doll.ps.policies.asp import Asp
from doll.ps.policies.base import Policy
from doll.ps.policies.bsp import Bsp, BspPolicyConfig
from doll.ps.policies.doll import Doll, DollPolicyConfig
from doll.records.control import Alive, Grant, Join, Leave, Welcome
from engine_invariants import check_engine
from pushes import answer
from record_builders import announce


class Bench:
    """Two workers that may hold three batches each, and groups of five."""

    def __init__(self, group_size: int = 5, policy: Policy | None = None) -> None:
        settings = EngineSettings(
            num_workers=2, records_per_batch=1, max_pending_batches=3, lease_s=8.0, grant_timeout_s=30.0,
            checkpoint_every_updates=1, checkpoint_every_s=1000.0, stop=StopConfig(),
        )  # fmt: skip
        self.engine = Engine(settings, policy or Doll(group_size), term=1, now=0.0, origins=(0, 0))
        self.sessions: dict[int, int] = {}
        for worker in (0, 1):
            self.join(worker)

    def join(self, worker: int, process: str = "a") -> None:
        for action in self.handle(Join(worker=worker, process=f"{process}{worker}")):
            if isinstance(action, Welcome):
                self.sessions[worker] = action.session

    def announce(self, worker: int, until: int) -> list[Grant]:
        actions = self.handle(announce(worker, self.sessions[worker], 0, until))
        return [action for action in actions if isinstance(action, Grant)]

    def push(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self.handle(answer(grant, 1, ""))

    def handle(self, event: ev.Event, now: float = 1.0) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, now)
        check_engine(self.engine)
        return actions


def report_of(bench: Bench, stuck: StallDetector, now: float, policy: PolicyConfig | None = None) -> str | None:
    """What the server reports at `now`."""
    missing = bench.engine.shortfall()
    if not stuck.check(missing, now):
        return None
    return (policy or DollPolicyConfig()).shortfall_text(
        missing, live=bench.engine.num_live, workers=2, max_pending_batches=3
    )


def test_waiting_for_data_is_not_being_stuck() -> None:
    bench = Bench()
    assert bench.engine.shortfall() == 0
    bench.announce(0, 3)
    assert bench.engine.shortfall() == 0  # the other may still announce three


def test_a_group_larger_than_what_one_worker_can_hold_needs_the_other() -> None:
    bench = Bench()
    bench.announce(0, 3)
    bench.handle(Leave(worker=1, session=bench.sessions[1], cause="sigterm"))
    assert bench.engine.shortfall() == 2
    bench.join(1, "b")
    assert bench.engine.shortfall() == 0
    assert sum(len(grant.grant_ids) for grant in bench.announce(1, 2)) == 5  # and on it goes


def test_a_group_under_way_counts_what_it_has() -> None:
    bench = Bench()
    bench.announce(0, 3)
    grants = bench.announce(1, 3)
    mine = [grant for grant in grants if grant.worker == 0]
    bench.push(mine)
    assert bench.engine.shortfall() == 0
    bench.handle(Leave(worker=1, session=bench.sessions[1], cause="sigterm"))
    assert [len(grant.grant_ids) for grant in mine] == [3]
    assert bench.engine.num_held == 3
    assert bench.engine.shortfall() == 2  # worker 0 is full: its three are held in the group


def test_what_is_in_the_model_makes_room() -> None:
    bench = Bench(group_size=3)
    bench.push(bench.announce(0, 3))
    assert bench.engine.version == 1
    bench.handle(Leave(worker=1, session=bench.sessions[1], cause="sigterm"))
    assert bench.engine.shortfall() == 0


def test_it_is_reported_once_when_it_lasts_and_again_when_it_comes_back() -> None:
    bench = Bench()
    stuck = StallDetector(now=0.0)
    bench.handle(Leave(worker=1, session=bench.sessions[1], cause="sigterm"))
    assert report_of(bench, stuck, STALL_REPORT_S / 2) is None
    report = report_of(bench, stuck, STALL_REPORT_S)
    assert report is not None
    assert "2 batches more" in report
    assert "1 live workers of 2" in report
    assert report_of(bench, stuck, 2 * STALL_REPORT_S) is None
    bench.join(1, "b")
    assert report_of(bench, stuck, 3 * STALL_REPORT_S) is None
    assert stuck.stalled_s(3 * STALL_REPORT_S) == 0
    bench.handle(Leave(worker=1, session=bench.sessions[1], cause="sigterm"))
    assert report_of(bench, stuck, 3.5 * STALL_REPORT_S) is None
    assert report_of(bench, stuck, 4 * STALL_REPORT_S) is not None


def let_its_grant_time_out(bench: Bench, worker: int) -> None:
    """Its process is alive, and its gradient does not come."""
    for other in (0, 1):
        alive = Alive(worker=other, session=bench.sessions[other])
        bench.handle(alive, now=32.0)
    bench.handle(ev.Tick(), now=32.0)
    assert bench.engine.worker(worker).stalled


def test_bsp_is_stuck_when_a_worker_that_is_up_owes_a_gradient_and_does_not_give_it() -> None:
    bench = Bench(policy=Bsp())
    first, second = bench.announce(0, 1), bench.announce(1, 1)
    assert bench.engine.shortfall() == 0
    bench.push(first)
    let_its_grant_time_out(bench, 1)
    assert bench.engine.num_held == 1
    assert bench.engine.shortfall() == 1
    stuck = StallDetector(now=0.0)
    report = report_of(bench, stuck, STALL_REPORT_S, BspPolicyConfig())
    assert report is not None
    assert "policy bsp needs a batch of every live worker, and 1 of 2 give none" in report
    bench.push(second)  # late: refused, but it is well again, and gets its batch once more
    assert bench.engine.shortfall() == 0
    assert report_of(bench, stuck, 2 * STALL_REPORT_S, BspPolicyConfig()) is None


def test_bsp_is_stuck_when_one_stream_has_no_records_and_the_others_are_full() -> None:
    bench = Bench(policy=Bsp())
    bench.push(bench.announce(0, 2))
    assert bench.engine.shortfall() == 0  # slower streams are waited for: the other still has room
    bench.announce(0, 3)
    assert bench.engine.shortfall() == 1
    bench.handle(Alive(worker=1, session=bench.sessions[1], lag=1))
    assert bench.engine.shortfall() == 0  # it has something to read
    bench.push(bench.announce(1, 1))
    assert bench.engine.version == 1


def test_asp_is_stuck_when_nobody_can_compute() -> None:
    bench = Bench(policy=Asp())
    assert bench.engine.shortfall() == 0
    grants = [*bench.announce(0, 3), *bench.announce(1, 3)]
    assert (len(grants), bench.engine.shortfall()) == (2, 0)
    let_its_grant_time_out(bench, 0)
    assert bench.engine.shortfall() == 1  # of both
    bench.push(grants[:1])
    assert bench.engine.shortfall() == 0


def test_without_any_worker_every_policy_is_stuck() -> None:
    for policy in (Doll(1), Bsp(), Asp()):
        bench = Bench(policy=policy)
        for worker in (0, 1):
            bench.handle(Leave(worker=worker, session=bench.sessions[worker], cause="sigterm"))
        assert bench.engine.shortfall() == 1
        report = report_of(bench, StallDetector(now=0.0), STALL_REPORT_S)
        assert report is not None
        assert "the 0 live workers of 2" in report
