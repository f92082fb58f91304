"""What keeps the ledger balanced is taken away, one thing at a time: the audit must say so, or a test of it is empty.

The same random schedules are played with the real engine and worker, which balance, and with the mutants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from doll.consumers.intake.batching import Batcher
from doll.consumers.protocol.worker_core import Acknowledge, Batch, Send
from doll.errors import IllegalEventError
from doll.ledger.balance import LedgerReport
from doll.ledger.valid_updates import DurableModel
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.policies.base import BatchId, Policy, PolicyView
from doll.ps.policies.bsp import Bsp
from doll.ps.policies.doll import Doll, DollPolicyConfig
from doll.records.control import Announce, Join, Member, TermStarted, Update, Welcome
from engine_world import POLICIES, Process, World
from record_builders import balance

pytestmark = pytest.mark.slow  # long random runs

SEEDS = range(12)


class LedgerWorld(World):
    """A world whose batches know the offsets that they hold, and whose books are those of `doll audit`."""

    def __init__(self, policy: str) -> None:
        self.records: list[TermStarted | Update] = []
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}  # offsets that a gradient was computed on, by grant
        super().__init__(policy)

    def start_ps(self) -> None:
        super().start_ps()
        assert self.engine is not None
        self.records.append(
            TermStarted(
                term=self.term, resumed_version=self.engine.version, origins=tuple(self.origins),
                records_per_batch=self.settings.records_per_batch, time_s=self.now,
            )
        )  # fmt: skip

    def read(self, process: Process) -> None:
        core, batcher = process.core, process.batcher
        if core is None or batcher is None or process.paused or process.dead:
            return
        while core.has_room and process.position < self.high[process.worker]:
            offset = process.position
            process.position += 1
            for raw in batcher.feed([offset], [offset]):
                offsets = tuple(raw.offsets)
                self._do(process, core.batch_ready(Batch(raw.number, offsets, len(offsets), self.now)))

    def compute(self, process: Process, *, blob_lost: bool = False, end_set: bool = False) -> None:
        if process.computing:
            item = process.computing[0]
            for number, batch in zip(item.grant.grant_ids, item.batches, strict=True):
                self.held[item.grant.term, number] = batch.data
        super().compute(process, blob_lost=blob_lost, end_set=end_set)

    def _perform(self, engine: Engine, action: ev.EngineAction) -> list[ev.EngineAction]:
        if isinstance(action, ev.ApplyUpdate):
            members = []
            for item in action.sets:
                for pushed in item.push.batches:
                    offsets = self.held[self.term, pushed.grant_id]
                    members.append(
                        Member(
                            worker=item.push.worker, batch=pushed.batch, lo=offsets[0], hi=offsets[-1] + 1,
                            n_samples=len(offsets), base_version=item.push.version,
                        )
                    )  # fmt: skip
            self.records.append(
                Update(
                    term=self.term, version=action.version, members=tuple(members),
                    n_samples=sum(member.n_samples for member in members), loss=1.0, metrics={},
                    samples_total=action.samples_total, batches_total=action.batches_total, time_s=self.now,
                )
            )  # fmt: skip
        return super()._perform(engine, action)

    def audit(self) -> LedgerReport:
        assert self.stored is not None
        durable = DurableModel(
            term=self.term, version=self.stored.version, applied=self.stored.applied,
            origins=tuple(self.origins), records_per_batch=self.settings.records_per_batch,
        )  # fmt: skip
        return balance(durable=durable, ends=self.high, records=self.records, dead_letters=[])


class AcknowledgingOnAnnounce(LedgerWorld):
    """Offsets are acknowledged when their batch is announced, and a successor reads on behind them, as a plain
    consumer does."""

    def __init__(self, policy: str) -> None:
        self.committed: dict[int, int] = {}
        super().__init__(policy)

    def _do(self, process: Process, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.record, Announce):
                end = process.position
                self.committed[process.worker] = max(end, self.committed.get(process.worker, 0))
        super()._do(process, [action for action in actions if not isinstance(action, Acknowledge)])

    def receive(self, process: Process) -> None:
        joined_before = process.core is not None
        super().receive(process)
        if not joined_before and process.core is not None and process.batcher is not None:
            ahead = max(0, self.committed.get(process.worker, 0) - process.batcher.next_offset)
            welcome = self.commands[process.worker][process.reads_from - 1]
            assert isinstance(welcome, Welcome)
            process.batcher = Batcher(
                origin=welcome.origin + ahead,
                records_per_batch=self.settings.records_per_batch,
                next_batch=welcome.next_batch,
            )
            process.position = process.batcher.next_offset


class _ForgetfulEngine(Engine):
    """Does not check whether a batch that is announced again is in the model already, saved or not."""

    def _on_join(self, event: Join, now: float, actions: list[ev.EngineAction]) -> None:
        partition = self._partitions[event.worker]
        while partition.held_grants:
            number = partition.held_grants.popleft().number
            del self._grants[number], self._held[number]
        super()._on_join(event, now, actions)
        partition.applied = partition.announced = partition.durable

    def check_invariants(self) -> None:
        """The invariants do not hold any more; the audit must find this by itself."""


class NotCheckingWhatIsApplied(LedgerWorld):
    engine_class = _ForgetfulEngine

    def add_up(self, update: ev.ApplyUpdate) -> None:
        """Its host keeps what the engine has forgotten; here only the books must notice."""

    def _do(self, process: Process, actions: Sequence[object]) -> None:
        # The world itself notices when an acknowledgement runs ahead; here only the books must.
        super()._do(process, [action for action in actions if not isinstance(action, Acknowledge)])


def play(world: LedgerWorld, seed: int) -> LedgerReport:
    """Work, with deaths of workers in between; then let everything come to rest."""
    rng = random.Random(seed)
    for _ in range(1500):
        worker = rng.randrange(world.settings.num_workers)
        for process in world.live(worker)[:1]:
            for _ in range(3):
                world.read(process)
                world.send(process)
                world.receive(process)
                world.compute(process)
        world.high[worker] += rng.randrange(3)
        if rng.random() < 0.1:
            world.store_checkpoint()
        if rng.random() < 0.05:
            world.tick(0.7)
        if rng.random() < 0.02:
            world.kill_worker(worker)
            world.start_worker(worker)
    world.settle()
    # The last checkpoint is of the last version, as at the end of a job.
    return world.audit()


def offsets(ranges: Sequence[object]) -> int:
    return sum(item.hi - item.lo for item in ranges)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", SEEDS)
def test_with_everything_in_place_the_books_balance(policy: str, seed: int) -> None:
    report = play(LedgerWorld(policy), seed)
    assert report.violations() == []
    assert report.ok
    assert report.applied > 500


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_with_acknowledgement_on_announce_samples_are_lost(policy: str) -> None:
    reports = [play(AcknowledgingOnAnnounce(policy), seed) for seed in SEEDS]
    assert all(not report.ok for report in reports)
    assert sum(offsets(report.missing) for report in reports) > 100


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_the_check_of_what_is_applied_samples_count_twice(policy: str) -> None:
    """The audit finds it in each run, but where the engine or the world has come to a halt before."""
    reports = []
    for seed in SEEDS:
        try:
            reports.append(play(NotCheckingWhatIsApplied(policy), seed))
        except (AssertionError, IllegalEventError):
            assert policy in ("isp", "vap", "wsp"), "steps of batches that come again do not fit together"
    assert all(not report.ok for report in reports)
    if policy not in ("isp", "vap", "wsp"):
        assert sum(offsets(report.twice) for report in reports) > 100


# --- mutants of the policies ------------------------------------------------------------------------------------------


class _ImpatientBsp(Bsp):
    """Applies a gradient at once, not with the others of its round."""

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches()[:1]


class _OverfullDoll(Doll):
    """Starts one batch more than the group needs: it is left over at an older version."""

    def start(self, view: PolicyView) -> Sequence[int]:
        in_group = view.num_held + view.num_computing
        enough = self.group_size + 1 if in_group == 0 else 1
        if in_group > self.group_size or view.num_waiting < enough:
            return ()
        return (self._candidates.first(),)


class _SmallerGroups(Doll):
    """Applies what is there, however few."""

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches() if view.num_held else ()


class _StealingDoll(Doll):
    """Applies the newest gradients first."""

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches()[::-1] if view.num_held == self.group_size else ()


class MutantWorld(LedgerWorld):
    def __init__(self, policy: str, mutant: Callable[[], Policy]) -> None:
        self.mutant = mutant
        super().__init__(policy)

    def make_policy(self) -> Policy:
        return self.mutant()


def group_size() -> int:
    config = POLICIES["doll"]
    assert isinstance(config, DollPolicyConfig)
    return config.group_size


@pytest.mark.parametrize(
    ("policy", "mutant"),
    [
        ("bsp", _ImpatientBsp),
        ("doll", partial(_OverfullDoll, group_size())),
        ("doll", partial(_SmallerGroups, group_size())),
        ("doll", partial(_StealingDoll, group_size())),
    ],
)
def test_a_policy_that_breaks_its_rule_is_caught(policy: str, mutant: Callable[[], Policy]) -> None:
    caught = 0
    for seed in SEEDS:
        world = MutantWorld(policy, mutant)
        try:
            play(world, seed)
            world.check_ledger()
        except (AssertionError, IllegalEventError):  # an invariant, or the engine's own refusal
            caught += 1
    assert caught == len(SEEDS)
