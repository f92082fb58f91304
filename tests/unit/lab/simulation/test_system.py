"""Whole jobs in virtual time: by hand where the times are exact, against the formulas where they are random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from doll.config.policy import PolicyConfig
from doll.errors import ConfigError
from doll.provisioner.traces.availability import Markov
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.policies.bsp import BspPolicyConfig
from doll.ps.policies.doll import DollPolicyConfig
from doll.theory.queueing import harmonic
from engine_invariants import check_engine
from fuzzing import seeds

from doll_lab.simulation.report import formula_rate, summarise
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System


class Script:
    """Every slot goes up and down as written, then stays as it is last."""

    def __init__(self, *spans: tuple[bool, float]) -> None:
        self.written = spans

    def spans(self, slot: int) -> Iterator[tuple[bool, float]]:
        yield from self.written
        while True:
            yield self.written[-1][0], 1e9


def clockwork(workers: int = 1, **changes: object) -> SimulationSettings:
    """A batch per second and worker, a quarter of a second per gradient, nothing random."""
    base = SimulationSettings(
        rates_per_s=[10.0] * workers, batch_size=10, policy=DollPolicyConfig(group_size=1), arrival_scv=0.0,
        compute_s=0.25, compute="constant", updates=3, random_phase=False,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def paper(**changes: object) -> SimulationSettings:
    base = SimulationSettings(rates_per_s=[125.0] * 64, batch_size=256, policy=DollPolicyConfig(group_size=20),
                              updates=1500, seed=1)  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def test_every_batch_is_an_update_one_gradient_time_after_it_is_complete() -> None:
    system = System(clockwork())
    assert system.run().time_s == pytest.approx([1.25, 2.25, 3.25])
    assert system.trajectory.group_s == pytest.approx([0.25] * 3)
    assert system.usd == pytest.approx(3.25 * 0.286 / 3600)


def test_a_group_waits_for_k_batches_and_one_worker_computes_one_at_a_time() -> None:
    kept = System(clockwork(policy=DollPolicyConfig(group_size=2), updates=2)).run()
    assert kept.time_s == pytest.approx([2.5, 4.5])


def test_arrivals_pause_while_a_machine_is_gone_and_it_costs_nothing() -> None:
    system = System(clockwork(updates=2), spot=[True], preemption=Script((True, 1.5), (False, 2.0), (True, 1.0)))
    assert system.run().time_s == pytest.approx([1.25, 4.25])
    assert system.preemptions == 1
    assert system.usd == pytest.approx((4.25 - 2.0) * 0.158 / 3600)
    assert system.up_worker_s == pytest.approx(4.25 - 2.0)
    assert system.slot_up_s(0) == pytest.approx(4.25 - 2.0)


def test_a_gradient_under_way_is_lost_with_its_machine_and_computed_again() -> None:
    system = System(clockwork(updates=2), spot=[True], preemption=Script((True, 1.1), (False, 1.9), (True, 1.0)))
    assert system.run().time_s == pytest.approx([3.25, 4.15])
    assert system.engine.counters["requeued_leave"] == 1


@pytest.mark.parametrize("replacement", [True, False])
def test_a_set_under_way_is_lost_whole_with_its_machine(replacement: bool) -> None:
    """Two batches, granted at 2 s; the first is done at 2.25 s, and its gradient is in the memory that vanishes."""
    settings = clockwork(policy=DollPolicyConfig(group_size=2), updates=1, replacement=replacement)
    gone = Script((True, 2.3), (False, 1.0), (True, 1.0))
    system = System(settings, spot=[True], preemption=gone)
    assert system.run().time_s == pytest.approx([3.8])
    assert system.engine.counters["requeued_leave"] == (2 if replacement else 0)


def test_a_set_that_has_taken_its_time_is_pushed_and_the_rest_is_another_set() -> None:
    """Three batches of 1.5 s, granted at 3 s: the set ends with the second, at 6 s; at 7 s only the third is lost."""
    gone = Script((True, 7.0), (False, 1.0), (True, 1.0))
    settings = clockwork(policy=DollPolicyConfig(group_size=3), updates=1, compute_s=1.5)
    system = System(settings, spot=[True], preemption=gone)
    assert system.run().time_s == pytest.approx([9.5])
    assert system.engine.counters["requeued_leave"] == 1


def test_another_worker_replaces_the_batch_of_one_that_is_gone() -> None:
    """Digest D3: worker 0 vanishes at 1.1 s with a batch of the group of 2; worker 1's second batch takes its place."""
    changes = {"workers": 2, "policy": DollPolicyConfig(group_size=2), "updates": 1}
    gone = Script((True, 1.1), (False, 50.0), (True, 1.0))
    replaced = System(clockwork(**changes), spot=[True, False], preemption=gone)  # type: ignore[arg-type]
    assert replaced.run().time_s == pytest.approx([2.25])
    literal = System(clockwork(**changes, replacement=False), spot=[True, False], preemption=gone)  # type: ignore[arg-type]
    assert literal.run().time_s == pytest.approx([51.1 + 0.25])
    assert literal.engine.counters["requeued"] == 0


def test_samples_that_pile_up_are_announced_together() -> None:
    settings = clockwork(updates=4, arrivals_pause=False)
    system = System(settings, spot=[True], preemption=Script((True, 1.1), (False, 1.95), (True, 1.0)))
    assert system.run().time_s == pytest.approx([3.30, 3.55, 3.80, 4.25])


def test_piled_up_samples_are_announced_after_a_literal_outage_too() -> None:
    settings = clockwork(updates=4, arrivals_pause=False, replacement=False)
    system = System(settings, spot=[True], preemption=Script((True, 1.1), (False, 1.95), (True, 1.0)))
    assert system.run().time_s == pytest.approx([3.30, 3.55, 3.80, 4.25])


def test_a_machine_works_only_when_it_has_booted_and_its_boot_is_billed() -> None:
    system = System(
        clockwork(updates=2), spot=[True], preemption=Script((True, 1.5), (False, 2.0), (True, 1.0)), boot_s=0.5
    )
    assert system.run().time_s == pytest.approx([1.25, 4.75])
    assert system.usd == pytest.approx((4.75 - 2.0) * 0.158 / 3600)


class Moves:
    """A provisioner with a plan: (from second, spot)."""

    every_s = 1.0

    def __init__(self, *plan: tuple[float, Sequence[bool]]) -> None:
        self.plan = plan

    def decide(self, system: System) -> Sequence[bool]:
        return [markets for at_s, markets in self.plan if at_s <= system.now][-1]


def test_a_move_costs_a_boot_and_changes_the_price() -> None:
    system = System(
        clockwork(updates=2), spot=[True], preemption=Script((True, 1.0)), boot_s=0.5,
        provisioner=Moves((0.0, [True]), (1.5, [False])),
    )  # fmt: skip
    # The second batch is complete at 2.0; the move at 2.0 stops the worker for half a second.
    assert system.run().time_s == pytest.approx([1.25, 2.75])
    assert system.moves == 1
    assert system.usd == pytest.approx((2.0 * 0.158 + 0.75 * 0.286) / 3600)


def test_the_first_choice_of_markets_is_no_move() -> None:
    system = System(clockwork(), spot=[True], preemption=Script((False, 1.0)), provisioner=Moves((0.0, [False])))
    assert system.run().time_s == pytest.approx([1.25, 2.25, 3.25])
    assert system.moves == 0


def test_a_run_ends_at_its_time() -> None:
    system = System(clockwork(updates=None, seconds=2.5))
    assert len(system.run().time_s) == 2
    assert system.now == 2.5


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "b", "rate"), [(64, 20, 256, 125.0), (16, 4, 32, 50.0), (8, 8, 64, 100.0)])
def test_the_update_rate_is_the_formulas(n: int, k: int, b: int, rate: float) -> None:
    """Digest 6, "DOLL (1)"; the longer runs are in benchmarks/paper/rates.py."""
    compute_s = 0.2 * k * b / (n * rate) / harmonic(k)
    settings = paper(rates_per_s=[rate] * n, batch_size=b, policy=DollPolicyConfig(group_size=k), compute_s=compute_s)
    system = System(settings)
    system.run()
    summary = summarise(system, 1.0)
    assert summary.rate_measured == pytest.approx(n * rate / (k * b), rel=0.005)
    assert summary.max_waiting_batches < 3 * k


@pytest.mark.slow
def test_the_queue_grows_where_the_necessary_condition_fails() -> None:
    """Proposition 1: groups arrive every 0.64 s and take H_20 times the mean gradient time."""
    for load, grows in ((0.7, False), (1.3, True)):
        system = System(paper(compute_s=load * 0.64 / harmonic(20), updates=None, seconds=600.0))
        system.run()
        summary = summarise(system, 1.0)
        assert (summary.queue_growth > 1.5) is grows
        assert (summary.margin_necessary < 1) is grows


@pytest.mark.slow
def test_with_replacement_the_formula_holds_and_without_it_the_job_stalls() -> None:
    """Digest 1.2, (30, 0.9): at least 99 % against at most 70 %."""
    slots = [slot < 30 for slot in range(64)]
    shares = {}
    for replacement in (True, False):
        done = 0.0
        for seed in seeds(4):
            seconds = 600 / formula_rate(paper(), slots, 0.9)
            settings = paper(updates=None, seconds=seconds, seed=seed, replacement=replacement)
            system = System(settings, spot=slots, preemption=Markov(0.9, 1000.0, np.random.default_rng((seed, 1))))
            system.run()
            drawn = summarise(system, 0.9).rate_at_observed_uptime * seconds
            done += system.version / drawn / len(seeds(4))
        shares[replacement] = done
    assert shares[True] > 0.99
    assert shares[False] < 0.7


def test_without_a_random_phase_batches_come_in_bursts() -> None:
    """Digest 1.3, "Phase trap"."""
    settings = paper(updates=None, seconds=20.0)
    spread = {}
    for random_phase in (True, False):
        kept = System(replace(settings, random_phase=random_phase)).run()
        spread[random_phase] = float(np.std(np.diff(kept.time_s)))
    assert spread[False] > 3 * spread[True]


@pytest.mark.parametrize(
    "policy", [DollPolicyConfig(group_size=3), BspPolicyConfig(name="bsp"), AspPolicyConfig(name="asp")]
)
@pytest.mark.parametrize("replacement", [True, False])
def test_the_engines_invariants_hold_whatever_vanishes(policy: PolicyConfig, replacement: bool) -> None:
    settings = SimulationSettings(
        rates_per_s=[40.0, 20.0, 30.0, 10.0, 25.0], batch_size=10, policy=policy, compute_s=0.15, seconds=120.0,
        replacement=replacement, checkpoint_every_updates=3,
    )  # fmt: skip
    system = System(settings, spot=[True] * 4 + [False], preemption=Markov(0.7, 8.0, np.random.default_rng(3)))
    handle = system.engine.handle

    def checked(event: object, now: float) -> object:
        actions = handle(event, now)  # type: ignore[arg-type]
        check_engine(system.engine)
        return actions

    system.engine.handle = checked  # type: ignore[method-assign, assignment]
    system.run()
    applied = system.engine.snapshot(system.now).applied
    assert system.version > 20
    assert system.preemptions > 20
    assert all(done <= complete for done, complete in zip(applied, system.complete, strict=True))
    if isinstance(policy, DollPolicyConfig):
        assert sum(applied) == 3 * system.version
    assert (system.engine.batches_total, system.engine.samples_total) == (sum(applied), 10 * sum(applied))


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [System(paper(updates=50, seed=seed)).run().time_s for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rates_per_s": []}, "arrival rate above 0"),
        ({"rates_per_s": [1.0, 0.0]}, "arrival rate above 0"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"compute_s": -1.0}, "compute_s >= 0"),
        ({"updates": None}, "an end"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        paper(**changes)


def test_preemptible_slots_need_a_preemption_model() -> None:
    with pytest.raises(ValueError, match="preemption model"):
        System(clockwork(), spot=[True])
    with pytest.raises(ValueError, match="expected 1 slots"):
        System(clockwork(), spot=[False, False])
