"""Batches and waves that take longer than the time limit of a grant: learned once, and the limit follows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from doll.config import StopConfig
from doll.config.policy import PolicyConfig
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import Batch, Compute, ComputedBatch, GradientDone, Send, WorkerCore
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies import make_policy
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.policies.bsp import BspPolicyConfig
from doll.ps.policies.doll import DollPolicyConfig
from doll.ps.policies.essp import EsspPolicyConfig
from doll.ps.policies.isp import IspPolicyConfig
from doll.ps.policies.ssp import SspPolicyConfig
from doll.ps.policies.wsp import WspPolicyConfig
from doll.records.control import Alive, AnyRecord, Durable, Grant, Hello, Join, Push, Welcome
from engine_invariants import check_engine
from msgspec import structs
from pushes import push_of
from record_builders import announce

TIMEOUT_S, SET_LIMIT_S, PENDING = 30.0, 2.0, 64


def engine_of(policy: PolicyConfig, workers: int) -> Engine:
    settings = EngineSettings(
        num_workers=workers, records_per_batch=1, max_pending_batches=PENDING, lease_s=8.0, grant_timeout_s=TIMEOUT_S,
        checkpoint_every_updates=20, checkpoint_every_s=2.0, set_limit_s=SET_LIMIT_S, stop=StopConfig(),
    )  # fmt: skip
    return Engine(settings, make_policy(policy), term=1, now=0.0, origins=[0] * workers)


# --- the engine and the worker's protocol, in virtual time ------------------------------------------------------------


@dataclass
class Computing:
    """What a worker computes one after the other."""

    order: Compute
    at: int = 0  # which of its batches
    done_at_s: float = 0.0


class SlowWorkers:
    """Workers, each of whose batches takes so many seconds; messages take no time, and streams never end.

    Attributes:
        applied: batches in the order of their updates: (worker, number).
        computed: batches that were computed by each worker.
    """

    def __init__(self, policy: PolicyConfig, *batch_s: float) -> None:
        self.now = 0.0
        self.batch_s = batch_s
        self.size = policy.batches_per_push
        self.engine = engine_of(policy, len(batch_s))
        self.applied: list[tuple[int, int]] = []
        self.computed = [0] * len(batch_s)
        self.held: list[list[tuple[int, int]]] = [[] for _ in batch_s]
        self.inbox: deque[tuple[int, AnyRecord]] = deque()
        self.cores: dict[int, WorkerCore] = {}
        self.computing: list[deque[Computing]] = [deque() for _ in batch_s]
        for worker in range(len(batch_s)):
            self.feed(Join(worker=worker, process=f"p{worker}"))
        self.deliver()

    def feed(self, event: ev.Event) -> None:
        events = deque([event])
        while events:
            actions = self.engine.handle(events.popleft(), self.now)
            check_engine(self.engine)
            for action in actions:
                match action:
                    case Welcome() | Grant() | Durable():
                        self.inbox.append((action.worker, action))
                    case ev.SendHello(worker):
                        self.inbox.append((worker, Hello(term=1)))
                    case ev.FetchGradient(grant_id):
                        events.append(ev.GradientFetched(grant_id=grant_id))
                    case ev.ApplyUpdate():
                        names = ((item.push.worker, batch.batch) for item in action.sets for batch in item.push.batches)
                        self.applied += names
                    case ev.StoreCheckpoint(version):
                        events.append(ev.CheckpointStored(version=version))

    def deliver(self) -> None:
        while self.inbox:
            worker, record = self.inbox.popleft()
            core = self.cores.get(worker)
            if core is not None:
                self.do(worker, core.on_record(record, self.now))
            elif isinstance(record, Welcome):
                self.cores[worker] = WorkerCore(record, max_pending=PENDING, now=self.now)
            self.read(worker)

    def read(self, worker: int) -> None:
        core = self.cores[worker]
        while core.has_room:
            self.do(
                worker,
                core.batch_ready(Batch(core.served[core.worker].next_batch, None, 1, self.now, partition=worker)),
            )

    def do(self, worker: int, actions: object) -> None:
        assert isinstance(actions, list)
        for action in actions:
            if isinstance(action, Send):
                self.feed(action.record)  # type: ignore[arg-type]
            elif isinstance(action, Compute):
                self.computing[worker].append(Computing(action))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for worker, core in self.cores.items():
                self.compute(worker, core)
                self.do(worker, core.tick(self.now))
            self.feed(ev.Tick())
            self.deliver()

    def compute(self, worker: int, core: WorkerCore) -> None:
        """As `GrantHandler`: a set ends when it has taken its time, a wave when it is whole."""
        queue = self.computing[worker]
        while queue and not core.is_current(queue[0].order.grant):
            queue.popleft()
        if not queue:
            return
        item = queue[0]
        grant, batches = item.order.grant, item.order.batches
        if not item.done_at_s:
            item.done_at_s = self.now + self.batch_s[worker]
        if self.now < item.done_at_s:
            return
        item.at, item.done_at_s = item.at + 1, 0.0
        self.computed[worker] += 1
        if self.size == 1 and item.at < len(batches) and item.at * self.batch_s[worker] < SET_LIMIT_S:
            return
        queue.popleft()
        # As `SetContribution.holds`: a batch that is granted again takes its own place, and that of all behind it.
        held = [name for name in self.held[worker] if name[0] < batches[0].number]
        held += ((batch.number, number) for batch, number in zip(batches[: item.at], grant.grant_ids, strict=False))
        is_kept = (batches[item.at - 1].number + 1) % self.size != 0
        self.held[worker] = held if is_kept else []
        done = GradientDone(
            f"g{grant.grant_ids[0]}", grant.version, tuple(ComputedBatch(1) for _ in batches[: item.at]),
            is_kept=is_kept, holds=() if is_kept else tuple(held),
        )  # fmt: skip
        if item.at < len(batches):
            rest = part_of(grant, item.at)
            queue.appendleft(Computing(Compute(rest, batches[item.at :])))
        self.do(worker, core.gradient_done(grant, batches, done, self.now))

    def check(self) -> None:
        """Each batch is applied once, and the batches of each stream in order."""
        for worker in range(len(self.batch_s)):
            numbers = [number for owner, number in self.applied if owner == worker]
            assert numbers == list(range(len(numbers)))


HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("policy", "batch_s"),
    [
        (WspPolicyConfig(wave_batches=8, clock_distance=1), 5.0),
        (WspPolicyConfig(wave_batches=20, clock_distance=0), 2.0),
        (WspPolicyConfig(wave_batches=4, clock_distance=1, pipelined=True), 9.0),
        (WspPolicyConfig(wave_batches=3, clock_distance=0), 100.0),
        (AspPolicyConfig(), 35.0),
        (AspPolicyConfig(), 400.0),
        (SspPolicyConfig(staleness=2, under_way=1), 35.0),
        (SspPolicyConfig(staleness=3, under_way=4), 35.0),
        (EsspPolicyConfig(staleness=3, under_way=4), 400.0),
        (BspPolicyConfig(), 35.0),
        (BspPolicyConfig(), 400.0),
        (DollPolicyConfig(group_size=1), 35.0),
        (DollPolicyConfig(group_size=3), 35.0),
        (IspPolicyConfig(), 35.0),
    ],
    ids=str,
)
def test_what_takes_longer_than_the_time_limit_is_learned_all_the_same(policy: PolicyConfig, batch_s: float) -> None:
    world = SlowWorkers(policy, batch_s)
    world.run(HOUR_S)
    world.check()
    possible = int(HOUR_S / batch_s)
    assert len(world.applied) >= 0.7 * possible - 2 * policy.batches_per_push
    assert world.computed[0] - len(world.applied) <= 2 * policy.batches_per_push
    under_way = max(policy.batches_per_push, policy.pushes_under_way)
    assert world.engine.counters["requeued_timeout"] <= 3 * under_way, "the limit has been raised"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [AspPolicyConfig(), SspPolicyConfig(), BspPolicyConfig(), DollPolicyConfig()])
def test_a_slow_worker_among_fast_ones_is_learned_from(policy: PolicyConfig) -> None:
    """Its limit is its own: the mean over all workers says nothing of it."""
    world = SlowWorkers(policy, 1.0, 1.0, 40.0, 1.0)
    world.run(HOUR_S / 2)
    world.check()
    share = sum(worker == 2 for worker, _ in world.applied)
    assert share >= 20
    assert world.engine.counters["requeued_timeout"] <= 6
    assert world.engine.time_limit_s(world.engine.worker(2)) >= 2 * 40.0


def test_a_wave_has_the_time_of_all_its_batches() -> None:
    world = SlowWorkers(WspPolicyConfig(wave_batches=8, clock_distance=1), 5.0)
    world.run(600.0)
    assert world.engine.counters["requeued_timeout"] == 0
    assert world.computed[0] - len(world.applied) <= 8


# --- one push at a time -----------------------------------------------------------------------------------------------


class Bench:
    """Workers whose messages are given by hand; they are alive all the time."""

    def __init__(self, policy: PolicyConfig, workers: int) -> None:
        self.now = 0.0
        self.engine = engine_of(policy, workers)
        self.sessions = {}
        for worker in range(workers):
            actions = self.handle(Join(worker=worker, process=f"p{worker}"))
            (welcome,) = [action for action in actions if isinstance(action, Welcome)]
            self.sessions[worker] = welcome.session

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        """Gradients are there at once, and checkpoints take for ever."""
        actions = self.engine.handle(event, self.now)
        check_engine(self.engine)
        for action in list(actions):
            if isinstance(action, ev.FetchGradient):
                actions += self.handle(ev.GradientFetched(grant_id=action.grant_id))
        return actions

    def announce(self, worker: int, until: int) -> Grant:
        event = announce(worker, self.sessions[worker], 0, until)
        return grants_of(self.handle(event))[0]

    def wait(self, seconds: float) -> list[ev.EngineAction]:
        actions = []
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for worker, session in self.sessions.items():
                actions += self.handle(Alive(worker=worker, session=session))
            actions += self.handle(ev.Tick())
        return actions

    def push(self, grant: Grant, **changes: object) -> Push:
        return push_of(
            **{
                "worker": grant.worker, "session": grant.session, "batch": grant.first, "term": 1,
                "grant_id": grant.grant_ids[0], "version": grant.version, "key": f"g{grant.grant_ids[0]}",
                "n_samples": 1, **changes,
            }  # type: ignore[arg-type]
        )  # fmt: skip


def grants_of(actions: list[ev.EngineAction]) -> list[Grant]:
    return [action for action in actions if isinstance(action, Grant)]


def updates_of(actions: list[ev.EngineAction]) -> list[ev.ApplyUpdate]:
    return [action for action in actions if isinstance(action, ev.ApplyUpdate)]


def dropped(actions: list[ev.EngineAction]) -> list[str]:
    return [action.key for action in actions if isinstance(action, ev.DropGradient)]


def test_a_late_push_counts_once_at_the_version_that_its_grant_allowed() -> None:
    bench = Bench(AspPolicyConfig(), 2)
    slow, fast = bench.announce(0, 2), bench.announce(1, 5)
    for _ in range(3):
        (fast,) = grants_of(bench.handle(bench.push(fast)))
    bench.wait(35.0)
    assert bench.engine.counters["requeued_timeout"] == 2
    late = bench.push(slow)
    actions = bench.handle(late)
    (update,) = updates_of(actions)
    (item,) = update.sets
    assert (item.push.worker, item.push.version, item.push.key) == (0, 0, late.key)
    assert [(batch.lo, batch.hi, batch.granted_at_s) for batch in item.batches] == [(0, 1, 0.0)]
    assert [(grant.worker, grant.first) for grant in grants_of(actions)] == [(0, 1)], "batch 0 is not granted again"
    assert dropped(actions) == []
    again = bench.handle(late)
    assert updates_of(again) == []
    assert bench.engine.worker(0).applied == 1


def test_a_push_that_comes_behind_the_next_grant_of_its_batch_is_refused() -> None:
    bench = Bench(AspPolicyConfig(), 1)
    first = bench.announce(0, 2)
    bench.wait(31.0)
    bench.handle(Join(worker=0, process="p0", session=bench.sessions[0]))
    second = bench.announce(0, 2)
    assert second.first == first.first
    actions = bench.handle(bench.push(first))
    assert (updates_of(actions), dropped(actions)) == ([], [bench.push(first).key])
    (update,) = updates_of(bench.handle(bench.push(second)))
    assert [batch.batch for batch in update.sets[0].push.batches] == [0]


def test_a_late_push_whose_place_in_the_group_is_taken_is_refused_and_raises_the_limit() -> None:
    bench = Bench(DollPolicyConfig(group_size=2), 3)
    bench.handle(announce(0, bench.sessions[0], 0, 1))
    slow, fast = grants_of(bench.handle(announce(1, bench.sessions[1], 0, 9)))
    assert (slow.worker, fast.worker) == (0, 1)
    bench.handle(bench.push(fast))
    (other,) = grants_of(bench.wait(31.0))
    assert other.worker == 1, "in place of the batch of worker 0"
    bench.now += 4.0
    late = bench.handle(bench.push(slow))
    assert (updates_of(late), dropped(late)) == ([], []), "it may still be of use, if the other goes"
    actions = bench.handle(bench.push(other))
    assert len(updates_of(actions)) == 1
    assert dropped(actions) == [bench.push(slow).key], "of an earlier version"
    assert {(grant.worker, grant.first) for grant in grants_of(actions)} >= {(0, 0)}
    assert bench.engine.time_limit_s(bench.engine.worker(0)) == pytest.approx(2 * 35.0)


def test_a_late_push_takes_the_free_place_of_its_group_under_a_new_number() -> None:
    """The sum of a group is in the order of the grants; what was added before it came stays where it is."""
    bench = Bench(DollPolicyConfig(group_size=2), 2)
    bench.handle(announce(0, bench.sessions[0], 0, 1))
    slow, fast = grants_of(bench.handle(announce(1, bench.sessions[1], 0, 1)))
    bench.handle(bench.push(fast))
    bench.wait(31.0)
    assert bench.engine.counters["requeued_timeout"] == 1
    actions = bench.handle(bench.push(slow))
    (update,) = updates_of(actions)
    assert [item.grant_id for item in update.sets] == [2, 3]
    assert [item.push.worker for item in update.sets] == [1, 0]
    assert grants_of(actions) == []


def test_a_late_push_is_forgotten_with_its_process() -> None:
    bench = Bench(DollPolicyConfig(group_size=2), 3)
    bench.handle(announce(0, bench.sessions[0], 0, 1))
    slow, fast = grants_of(bench.handle(announce(1, bench.sessions[1], 0, 9)))
    bench.handle(bench.push(fast))
    bench.wait(31.0)
    assert dropped(bench.handle(bench.push(slow))) == []
    assert dropped(bench.handle(bench.push(slow))) == [], "it comes twice"
    assert dropped(bench.handle(Join(worker=0, process="another"))) == [bench.push(slow).key]


def test_a_late_push_of_a_part_of_a_step_is_refused() -> None:
    """What is held back may have been asked for since, and be in the model."""
    bench = Bench(IspPolicyConfig(), 1)
    grant = bench.announce(0, 2)
    bench.wait(31.0)
    actions = bench.handle(structs.replace(bench.push(grant), holds_back=True))
    assert (updates_of(actions), dropped(actions)) == ([], [bench.push(grant).key])
    assert bench.engine.time_limit_s(bench.engine.worker(0)) >= 62.0


@pytest.mark.parametrize("compute_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_what_a_worker_says_of_its_time_is_not_believed_beyond_its_life(compute_s: float) -> None:
    bench = Bench(AspPolicyConfig(), 1)
    grant = bench.announce(0, 1)
    bench.now = 5.0
    push = bench.push(grant, grant_id=77)
    (item,) = push.batches
    bench.handle(structs.replace(push, batches=(structs.replace(item, compute_s=compute_s),)))
    assert bench.engine.counters["refused_late"] == 1
    assert bench.engine.worker(0).batch_s <= 5.0
