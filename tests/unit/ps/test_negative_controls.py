"""What keeps the ledger balanced is taken away, one thing at a time: the audit must say so, or a test of it is empty.

The same random schedules are played with the real engine and worker, which balance, and with the mutants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from doll.errors import IllegalEventError
from doll.ledger.balance import LedgerReport
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.policies.base import BatchId, Policy, PolicyView
from doll.ps.policies.bsp import Bsp
from doll.ps.policies.doll import Doll, DollPolicyConfig
from doll.records.control import Announce, AnyRecord, Join
from engine_world import POLICIES, Process
from fuzzing import ALL_EXAMPLES
from ledger_world import LedgerWorld

pytestmark = pytest.mark.slow  # long random runs

SEEDS = range(12)


class AcknowledgingOnAnnounce(LedgerWorld):
    """Offsets are acknowledged when their batch is announced, and a successor reads on behind them, as a plain
    consumer does."""

    def __init__(self, policy: str) -> None:
        self.committed: dict[int, int] = {}
        super().__init__(policy)

    def to_server(self, process: Process, record: AnyRecord) -> None:
        if isinstance(record, Announce):
            self.committed[process.worker] = max(process.position, self.committed.get(process.worker, 0))
        super().to_server(process, record)

    def acknowledge(self, process: Process, partition: int, until: int) -> None:
        """What is acknowledged is in `committed`."""

    def begin_to_read(self, process: Process, origin: int) -> None:
        super().begin_to_read(process, origin)
        ahead = max(0, self.committed.get(process.worker, 0) - process.position)
        super().begin_to_read(process, origin + ahead)


class _ForgetfulEngine(Engine):
    """Does not check whether a batch that is announced again is in the model already, saved or not."""

    def _on_join(self, event: Join) -> None:
        queue, partition = self._workers[event.worker].queue, self._partitions[event.worker]
        while queue.held_grants:
            number = queue.held_grants.popleft().number
            partition.held -= 1
            del self._grants._standing[number], self._grants._held[number]
        super()._on_join(event)
        partition.applied = partition.announced = partition.durable


class NotCheckingWhatIsApplied(LedgerWorld):
    engine_class = _ForgetfulEngine

    def after_event(self) -> None:
        """The engine's invariants do not hold any more; the audit must find this by itself."""

    def add_up(self, update: ev.ApplyUpdate) -> None:
        """Its host keeps what the engine has forgotten; here only the books must notice."""

    def check_held(self) -> None:
        """As `add_up`."""

    def acknowledge(self, process: Process, partition: int, until: int) -> None:
        """The world itself notices when an acknowledgement runs ahead; here only the books must."""


def play(world: LedgerWorld, seed: int) -> LedgerReport:
    """Work, with deaths of workers in between; then let everything come to rest."""
    rng = random.Random(seed)
    for _ in range(1500):
        world.work(rng)
    world.settle()
    # The last checkpoint is of the last version, as at the end of a job.
    return world.audit()


def offsets(ranges: Sequence[object]) -> int:
    return sum(item.hi - item.lo for item in ranges)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", SEEDS if ALL_EXAMPLES else SEEDS[:3])
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


COME_TO_A_HALT = ("isp", "vap", "wsp", "diloco, sparse")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_the_check_of_what_is_applied_samples_count_twice(policy: str) -> None:
    """The audit finds it in each run, but where the engine or the world has come to a halt before."""
    reports = []
    for seed in SEEDS:
        try:
            reports.append(play(NotCheckingWhatIsApplied(policy), seed))
        except (AssertionError, IllegalEventError):
            assert policy in COME_TO_A_HALT, "steps of batches that come again do not fit together"
    assert all(not report.ok for report in reports)
    if policy not in COME_TO_A_HALT:
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
