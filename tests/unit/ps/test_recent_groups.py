"""doll with recent versions: who begins when, how old a gradient may be, and what an old one counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.slow_worker import learn
from doll.config import SgdConfig
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Optimizer
from doll.optim.row_optimizer import RowSgd
from doll.ps.engine.events import ApplyUpdate
from doll.ps.model.updater import ContributionBuffer
from doll.ps.policies import make_policy
from doll.ps.policies.base import Policy
from doll.ps.policies.doll import Doll, DollPolicyConfig, RecentDoll
from doll.ps.tables.store import TableStore
from doll.tables.rows import Rows
from fuzzing import ALL_EXAMPLES
from policy_view import PolicyWorld
from pushes import applied_set, push_of

from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

pytestmark = pytest.mark.slow  # loads torch


class Group(PolicyWorld):
    """Workers that always have batches; a worker delivers when the test says so."""

    def __init__(self, workers: int, policy: Policy) -> None:
        super().__init__(policy, workers)
        self.updates: list[list[int]] = []  # the workers of each
        for number in range(workers):
            self.put(number, waiting=100)
        self.go_on()

    def go_on(self) -> None:
        """What the engine does after each event."""
        while True:
            if group := self.policy.collect(self):
                self.updates.append([batch.partition for batch in group])
                for number in self.updates[-1]:
                    worker = self.workers[number]
                    self.put(number, held=worker.held - 1, applied=worker.applied + 1)
                self.version += 1
            elif starts := self.policy.start(self):
                for number in starts:
                    worker = self.workers[number]
                    assert worker.waiting
                    assert not worker.computing
                    self.put(number, waiting=worker.waiting - 1, computing=1)
            else:
                return

    def deliver(self, *numbers: int, at_s: float) -> None:
        self.now_s = at_s
        for number in numbers:
            self.put(number, computing=0, held=self.workers[number].held + 1)
            self.go_on()

    def tick(self, at_s: float) -> None:
        self.now_s = at_s
        self.go_on()

    @property
    def computing(self) -> set[int]:
        return {number for number, worker in enumerate(self.workers) if worker.computing}


def after_one_group() -> Group:
    """Four workers that take 1 s, but worker 0 takes 4 s; the first group has been slow."""
    group = Group(4, RecentDoll(4, 3))
    group.deliver(1, 2, 3, at_s=1.0)
    group.deliver(0, at_s=4.0)
    return group


def test_the_section_chooses_the_policy() -> None:
    assert type(make_policy(DollPolicyConfig())) is Doll
    recent = make_policy(DollPolicyConfig(group_size=3, staleness=2))
    assert isinstance(recent, RecentDoll)
    assert (recent.group_size, recent.staleness, recent.exact_version) == (3, 2, False)


def test_workers_of_one_speed_make_groups_of_one_version() -> None:
    group = Group(4, RecentDoll(4, 3))
    for second in range(1, 6):
        for place, number in enumerate((2, 0, 3, 1)):
            assert group.computing == set((2, 0, 3, 1)[place:]), "nobody begins before the update"
            group.deliver(number, at_s=second + 0.05 * place)
    assert group.updates == [[0, 1, 2, 3]] * 5


def test_no_more_than_a_group_begins_at_once_and_all_workers_take_turns() -> None:
    group = Group(6, RecentDoll(2, 3))
    assert group.computing == {0, 1}
    seen = []
    for second in range(1, 4):
        seen.append(sorted(group.computing))
        group.deliver(*seen[-1], at_s=float(second))
    assert seen == [[0, 1], [2, 3], [4, 5]]


def test_a_worker_takes_the_place_of_one_that_would_hold_the_group_up() -> None:
    group = after_one_group()
    assert len(group.updates) == 1
    group.deliver(1, 2, 3, at_s=5.0)
    assert group.computing == {0, 1}, "worker 0 is expected at 8 s, a batch of worker 1 at 6 s, and one is enough"
    group.deliver(1, at_s=6.0)
    assert group.updates[1] == [1, 1, 2, 3]
    assert group.computing == {0, 1, 2, 3}
    group.deliver(1, 2, 3, at_s=7.0)
    assert group.computing == {0}, "a batch of another worker would come no sooner than that of worker 0"
    group.deliver(0, at_s=8.0)
    assert group.updates[2] == [0, 1, 2, 3], "an old gradient is in the group of its time"


def test_a_gradient_that_is_late_by_two_batches_is_not_expected_any_more() -> None:
    group = Group(2, RecentDoll(2, 3))
    group.deliver(0, 1, at_s=1.0)
    group.deliver(0, at_s=2.0)
    for at_s in (2.5, 4.0):
        group.tick(at_s)
        assert group.computing == {1}, "expected at 2 s, and a batch takes 1 s"
    group.tick(4.1)
    assert group.computing == {0, 1}


def test_a_batch_that_was_taken_back_says_nothing_of_its_worker() -> None:
    group = after_one_group()
    group.now_s = 4.1
    group.put(3, computing=0, is_live=False, waiting=0)
    group.put(3, is_live=True, waiting=1)
    group.go_on()
    group.deliver(1, 2, at_s=5.0)
    assert group.computing >= {0, 3}
    group.deliver(3, at_s=5.1)
    assert group.computing == {0, 1}, "a batch takes 1 s, and not 0.1 s"


def test_an_update_waits_for_a_batch_that_has_missed_as_many_as_allowed() -> None:
    group = Group(3, RecentDoll(2, 2))
    assert group.computing == {0, 1}
    group.deliver(1, at_s=1.0)
    group.tick(2.5)  # worker 0 is late
    assert group.computing == {0, 2}
    group.deliver(2, at_s=3.0)
    assert group.updates == [[1, 2]]
    for second in range(4, 30, 2):
        group.tick(second)
        group.deliver(*(group.computing - {0}), at_s=second + 1.0)
    assert len(group.updates) == 2, "worker 0 has missed both"
    held = sum(worker.held for worker in group.workers)
    assert held >= 2
    assert list(group.policy.waits_for(group)) == [0]
    group.tick(100.0)
    assert 0 in group.computing
    assert len(group.updates) == 2
    group.deliver(0, at_s=101.0)
    assert len(group.updates) == 3
    assert len(group.updates[2]) == held + 1, "all that have come"
    assert list(group.policy.waits_for(group)) == []


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    group = Group(2, RecentDoll(1, 1))
    group.deliver(*group.computing, at_s=1.0)
    (slow,) = group.computing
    group.tick(10.0)
    other = 1 - slow
    assert group.computing == {0, 1}
    group.deliver(other, at_s=11.0)
    group.tick(20.0)
    group.deliver(*(group.computing - {slow}), at_s=21.0)
    assert list(group.policy.waits_for(group)) == [slow]
    done = len(group.updates)
    group.put(slow, computing=0, is_live=False, waiting=0)
    group.go_on()
    assert len(group.updates) == done + 1


def test_the_last_batches_of_a_source_are_a_group() -> None:
    group = after_one_group()
    group.num_left = 3
    for number in range(4):
        group.put(number, waiting=0)
    group.deliver(1, 2, at_s=5.0)
    group.deliver(3, at_s=5.5)
    assert group.updates[1] == [1, 2, 3]


# --- what an old gradient counts --------------------------------------------------------------------------------------


def updater() -> Optimizer:
    torch.manual_seed(0)
    return Optimizer(FlatModel(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))), SgdConfig(lr=1.0))


def order(version: int, *facts: tuple[int, int, int]) -> ApplyUpdate:
    """An update of these (grant, samples, version of the gradient)."""
    sets = tuple(
        applied_set(
            push_of(worker=0, session=1, batch=n, term=1, grant_id=n, version=base, key=f"k{n}", n_samples=samples)
        )
        for n, samples, base in facts
    )
    return ApplyUpdate(version, sets, 1 / sum(samples for _, samples, _ in facts), 0, 0)


def test_gradients_are_weighted_by_age_and_their_weights_have_a_mean_of_one() -> None:
    """One of 4 samples at the newest version, one of 12 that has missed 3 updates, which counts half per sample."""
    ours, rng = updater(), np.random.default_rng(0)
    before, parameters, floats = ours.weights.copy(), ours.num_parameters, ours.num_parameters + 2
    new, old = (rng.standard_normal(len(before)).astype(np.float32) for _ in range(2))
    buffer = ContributionBuffer(ours, age_weight=DollPolicyConfig(staleness=3).age_weight)
    buffer.put(1, new.copy())
    buffer.put(2, old.copy())
    buffer.apply(order(8, (1, 4, 7), (2, 12, 4)))
    mean = (new + 0.5 * old)[:parameters] / (4 + 0.5 * 12)
    np.testing.assert_allclose(ours.weights[:parameters], before[:parameters] - mean, rtol=1e-5, atol=1e-6)
    means = (new + old)[parameters:floats] / 16  # of BatchNorm: its values are those of all samples
    np.testing.assert_allclose(ours.weights[parameters:floats], means, rtol=1e-5, atol=1e-6)


def test_gradients_of_one_age_count_as_without_weights() -> None:
    ours, plain = updater(), updater()
    gradients = [np.full(len(ours.weights), value, np.float32) for value in (1.0, 3.0)]
    for target, weight in ((ours, DollPolicyConfig().age_weight), (plain, lambda age: 1.0)):
        buffer = ContributionBuffer(target, age_weight=weight)
        for number, gradient in enumerate(gradients, start=1):
            buffer.put(number, gradient.copy())
        buffer.apply(order(8, (1, 4, 5), (2, 4, 5)))
    assert ours.weights.tobytes() == plain.weights.tobytes()


def test_rows_of_tables_are_weighted_as_the_other_parameters() -> None:
    ours = updater()
    store = TableStore({"t": np.zeros((3, 2), np.float32)}, {"t": RowSgd(1.0)})
    buffer = ContributionBuffer(ours, store, DollPolicyConfig(staleness=3).age_weight)
    for number, ids in ((1, [0, 1]), (2, [1, 2])):
        rows = Rows(np.array(ids, np.int64), np.ones((2, 2), np.float32))
        buffer.put(number, np.zeros(len(ours.weights), np.float32), rows={"t": rows})
    buffer.apply(order(8, (1, 4, 7), (2, 4, 4)))
    new, old = 1 / 6, 0.5 / 6  # (1 + 0.5) 4 is the weight of all
    np.testing.assert_allclose(store.tables["t"].read(np.arange(3)).values[:, 0], [-new, -new - old, -old], rtol=1e-5)


# --- in virtual time, with the engine ---------------------------------------------------------------------------------


def test_one_slow_worker_costs_little_time_and_no_accuracy() -> None:
    """One of four workers takes four times as long."""
    samples, loss = (40_000, 0.005) if ALL_EXAMPLES else (10_000, 0.06)
    exact, recent = (
        learn(DollPolicyConfig(group_size=4, staleness=staleness), (4.0, 1.0, 1.0, 1.0), seed=0, samples=samples)
        for staleness in (0, 3)
    )
    assert exact.oldest == 0 < recent.oldest <= 3
    assert recent.samples_per_s >= 1.7 * exact.samples_per_s
    assert recent.accuracy >= exact.accuracy - loss


def test_without_a_slow_worker_groups_are_as_fast_as_with_exact_versions() -> None:
    exact, recent = (
        System(
            SimulationSettings(
                rates_per_s=[1000.0] * 4, batch_size=10, compute="constant", compute_s=0.05, seconds=60.0,
                policy=DollPolicyConfig(group_size=4, staleness=staleness),
            )
        )
        for staleness in (0, 3)
    )  # fmt: skip
    for system in (exact, recent):
        system.run()
    assert recent.version >= 0.99 * exact.version > 1000
