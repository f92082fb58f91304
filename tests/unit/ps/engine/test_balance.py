"""Which partitions move for the work that they bring, and when."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from doll.ps.engine.assignment import first_assignment, largest_load, reassigned, reassigned_by_load
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import ApplyUpdate, EngineAction, FetchGradient, GradientFetched, SendHello, Tick
from doll.ps.engine.moves import PartitionLoads
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.asp import Asp
from doll.records.control import Alive, Announce, BatchRange, Grant, Join, Scale, Welcome
from engine_invariants import check_engine
from hypothesis import given
from hypothesis import strategies as st
from pushes import push_of

owners_ = st.lists(st.tuples(st.integers(0, 6), st.sampled_from((0.0, 0.1, 1.0, 3.0, 90.0))), min_size=1, max_size=40)


@given(owners_, st.integers(1, 9))
def test_an_assignment_by_load_is_whole_and_its_own(items: list[tuple[int, float]], num_workers: int) -> None:
    owners, loads = zip(*items, strict=True)
    made = reassigned_by_load(owners, range(num_workers), loads)
    assert {*made} <= {*range(num_workers)}
    assert len({*made}) == min(num_workers, len(owners)), "nobody is idle while another has two"
    assert reassigned_by_load(made, range(num_workers), loads) == made
    if max(owners) < num_workers:
        assert largest_load(made, loads) <= largest_load(owners, loads) + 0.05 * sum(loads)
    # No worker has more than the mean and a tenth of it beside its largest partition.
    base = 0.05 * (sum(loads) / len(loads) or 1.0)
    weights = [load + base for load in loads]
    mean = sum(weights) / num_workers
    assert largest_load(made, weights) <= 1.1 * mean + max(weights) + 1e-9


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 12))
def test_equal_loads_move_no_more_partitions_than_equal_numbers_need(partitions: int, before: int, after: int) -> None:
    owners = first_assignment(partitions, before)
    made = reassigned_by_load(owners, range(after), [1.0] * partitions)
    wanted = reassigned(owners, range(after))
    moves, needed = (sum(a != b for a, b in zip(owners, to, strict=True)) for to in (made, wanted))
    assert moves <= needed


def test_one_partition_with_most_of_the_records_is_left_alone_and_the_others_are_spread() -> None:
    loads = [90.0, *[10 / 7] * 7]
    assert reassigned_by_load(first_assignment(8, 4), range(4), loads)[0] == 0
    grown = reassigned_by_load(first_assignment(8, 1), range(4), loads)
    own = [number for number, worker in enumerate(grown) if worker == grown[0]]
    assert own == [0], "with room for it, nothing waits behind it"


def test_skewed_partitions_are_balanced_by_their_rates() -> None:
    loads = [50.0, 3, 3, 3, 40, 3, 3, 3, 30, 3, 3, 3]  # all three large ones at worker 0
    owners = first_assignment(12, 4)
    assert largest_load(owners, loads) == 120
    made = reassigned_by_load(owners, range(4), loads)
    assert largest_load(made, loads) < 60, "50 is one partition"
    assert sum(a != b for a, b in zip(owners, made, strict=True)) <= 3


class Rig:
    """Partitions of two workers, with a record a batch; gradients come at once. Virtual seconds."""

    def __init__(self, rebalance_s: float = 60.0, partitions: int = 4, workers: int = 2) -> None:
        settings = EngineSettings(
            num_workers=workers, max_workers=4, records_per_batch=1, max_pending_batches=1000, lease_s=5.0,
            grant_timeout_s=1e9, checkpoint_every_updates=10**9, checkpoint_every_s=1e9, rebalance_s=rebalance_s,
        )  # fmt: skip
        self.engine = Engine(settings, Asp(), term=1, now=0.0, origins=(0,) * partitions, run_id="run")
        self.now = 0.0
        self.announced = [0] * partitions
        self.unread: dict[int, int] = {}  # by partition
        self.served: dict[int, list[int]] = {}
        for worker in range(workers):
            self.join(worker)

    def join(self, worker: int) -> None:
        self.handle(Join(worker=worker, process=f"p{worker}"))

    def handle(self, event: object) -> None:
        actions: list[EngineAction] = self.engine.handle(event, self.now)  # type: ignore[arg-type]
        check_engine(self.engine)
        for action in actions:
            match action:
                case Welcome(worker=worker, served=served):
                    self.served[worker] = [item.partition for item in served]
                    for item in served:
                        self.announced[item.partition] = item.next_batch
                        if item.included > item.next_batch:
                            self.announce(item.partition, item.included - item.next_batch)
                case SendHello(worker):
                    self.join(worker)
                case FetchGradient(grant_id=number):
                    self.handle(GradientFetched(grant_id=number))
                case Grant():
                    self.handle(
                        push_of(
                            worker=action.worker, session=action.session, batch=action.first, term=1,
                            grant_id=action.grant_ids[0], version=action.version, key="g", n_samples=1, loss_sum=1.0,
                        )
                    )  # fmt: skip
                case ApplyUpdate():
                    pass

    def announce(self, partition: int, count: int) -> None:
        owner = next(worker for worker, served in self.served.items() if partition in served)
        first = self.announced[partition]
        self.announced[partition] += count
        runs = (BatchRange(partition, first, first + count),)
        self.handle(Announce(worker=owner, session=self.engine.worker(owner).session, runs=runs))

    def second(self, *rates: int) -> None:
        """So many batches of each partition; then what is unread is told, and time is."""
        self.now += 1.0
        for partition, count in enumerate(rates):
            if count:
                self.announce(partition, count)
        for worker, served in self.served.items():
            unread = tuple((number, self.unread[number]) for number in served if number in self.unread)
            session = self.engine.worker(worker).session
            lag = sum(count for _, count in unread)
            self.handle(Alive(worker=worker, session=session, lag=lag, most_unread=unread))
        self.handle(Tick())


def test_a_partition_leaves_a_worker_that_is_behind_for_one_that_has_less() -> None:
    rig = Rig()
    rig.unread = {0: 1000, 2: 1000}  # both at worker 0
    for _ in range(59):
        rig.second(3, 1, 3, 1)
    assert rig.served == {0: [0, 2], 1: [1, 3]}
    for _ in range(3):
        rig.second(3, 1, 3, 1)
    assert rig.served == {0: [2], 1: [0, 1, 3]}
    for _ in range(200):
        rig.second(3, 1, 3, 1)
    assert rig.served == {0: [2], 1: [0, 1, 3]}, "it stays"


@pytest.mark.parametrize(("rebalance_s", "kept"), [(60.0, True), (0.0, False)])
def test_what_was_assigned_by_load_stays_over_a_restart(rebalance_s: float, kept: bool) -> None:
    assignment = (0, 1, 1, 1)
    snapshot = msgspec.structs.replace(Rig().engine.snapshot(0.0), assignment=assignment)
    settings = dataclasses.replace(Rig().engine.settings, rebalance_s=rebalance_s)
    engine = Engine(settings, Asp(), term=2, now=0.0, snapshot=snapshot)
    assert (engine.snapshot(0.0).assignment, not engine.moves.targets) == (assignment, kept)


def test_with_another_number_of_workers_numbers_decide_after_a_restart() -> None:
    snapshot = msgspec.structs.replace(Rig().engine.snapshot(0.0), num_workers=3)
    engine = Engine(Rig().engine.settings, Asp(), term=2, now=0.0, snapshot=snapshot)
    assert [worker.number for worker in engine.moves.targets.values()] == [2]


@pytest.mark.parametrize("reason", ["no backlog", "off", "nothing gained", "a worker is away"])
def test_nothing_moves_without_need(reason: str) -> None:
    rig = Rig(0.0 if reason == "off" else 60.0)
    rates = (3, 3, 3, 2) if reason == "nothing gained" else (3, 1, 3, 1)
    rig.unread = {} if reason == "no backlog" else {0: 20, 2: 20, 1: 19, 3: 19} if "gained" in reason else {0: 99}
    for _ in range(150):
        if reason == "a worker is away":
            rig.served.pop(1, None)
            rig.second(3, 0, 3, 0)
        else:
            rig.second(*rates)
    assert rig.served[0] == [0, 2]


def test_a_job_that_is_scaled_moves_by_load_where_it_is_known() -> None:
    rig = Rig(partitions=5, workers=1)
    for _ in range(61):
        rig.second(9, 1, 1, 1, 1)
    rig.join(1)
    rig.handle(Scale(workers=2, run_id="run"))
    assert rig.served == {0: [1, 2, 3, 4], 1: [0]} or rig.served == {0: [0], 1: [1, 2, 3, 4]}


def test_loads_are_what_was_learned_and_what_waits() -> None:
    rig = Rig(rebalance_s=0.0)
    loads = PartitionLoads(rig.engine._partitions, rig.engine._owners, window_s=10.0, records_per_batch=1)
    loads.observe(0.0)
    rig.unread = {0: 50}
    for second in range(1, 21):
        rig.second(2, 1, 0, 0)
        loads.observe(float(second))
        assert (loads.loads(float(second)) is None) == (second < 10)
    assert loads.loads(20.0) == pytest.approx([2 + 50 / 10, 1, 0, 0])
    worker = rig.engine.worker(1)
    worker.lag = 40  # of which it names no partition
    assert loads.loads(20.0) == pytest.approx([7, 1 + 2, 0, 2])
