"""Backtests in several regions: the optimum against every schedule, the replay, the planner, and the rivals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from doll.errors import ConfigError
from doll.provisioner.planning.regions import NOWHERE, Traffic
from doll.provisioner.planning.state import Bools
from doll.provisioner.traces.model import Floats, Pool, Series, TraceSet, constant

from doll_lab.backtests.backtest import BacktestSettings, Outcome
from doll_lab.backtests.optimum import boot_ticks, fleet_cost, slot_costs
from doll_lab.backtests.region_backtest import backtest_regions
from doll_lab.backtests.region_rivals import pool, rivals, selected
from doll_lab.backtests.regions import (
    AdaptiveRegions,
    Machines,
    RegionJobs,
    RegionSettings,
    Sight,
    few_regions,
    optimum_usd,
    replay_regions,
)

pytestmark = pytest.mark.slow  # simulations of whole jobs

TICK_S = 180.0


def jobs(
    up: Bools, usd: Floats, *, work: int, on_demand: float = 1.0, start_usd: tuple[float, ...] = (), boot: int = 1
) -> RegionJobs:
    """One job: `up` of shape (R, T, N) and `usd` of shape (R, T)."""
    regions, ticks, _ = up.shape
    return RegionJobs(
        up=up[None], usd=usd[None], on_demand=np.array([on_demand]), home_on_demand=np.array([on_demand]),
        start_usd=np.array([start_usd or (0.0,) * (regions + 1)]), tick_s=TICK_S, boot_s=boot * TICK_S,
        deadline_s=ticks * TICK_S, work=work,
    )  # fmt: skip


class Scripted:
    """A policy that follows a given schedule of machines, shape (T, N)."""

    name = "scripted"

    def __init__(self, schedule: Machines) -> None:
        self._schedule = schedule

    def start(self, jobs: RegionJobs) -> None: ...

    def decide(self, sight: Sight) -> Machines:
        return self._schedule[sight.tick][None]


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_the_cheapest_of_all_schedules(seed: int) -> None:
    """Brute force: the production replay runs every schedule of one slot, and of two slots with fewer ticks."""
    rng = np.random.default_rng(seed)
    slots, ticks, regions = (1, 5, 2) if seed % 2 else (2, 3, 1)
    boot = seed % 3
    up = rng.random((regions, ticks, slots)) < 0.7
    usd = rng.uniform(0.1, 1.2, (regions, ticks))
    job = jobs(up, usd, work=slots * ticks - 2, start_usd=(0.0, 0.01, 0.003)[-regions - 1 :], boot=boot)
    choices = itertools.product(range(NOWHERE, regions + 1), repeat=slots * ticks)
    best = np.inf
    for choice in choices:
        outcome = replay_regions(Scripted(np.array(choice).reshape(ticks, slots)), job)
        if outcome.finish_s[0] <= job.deadline_s:
            best = min(best, float(outcome.usd[0]))
    assert optimum_usd(job)[0] == pytest.approx(best)


def test_the_optimum_waits_for_the_cheap_region_and_pays_a_boot_only_if_it_is_worth_it() -> None:
    up = np.ones((2, 10, 1), np.bool_)
    usd = np.array([[0.5] * 10, [0.9] * 5 + [0.05] * 5])
    costs = slot_costs(up, usd, 1.0, np.zeros(3), 1)[0]
    assert costs[0] == 0.0
    assert costs[4] == pytest.approx(5 * 0.05)  # a boot and four ticks of the cheap ones
    assert costs[10] == pytest.approx(5 * 0.9 + 5 * 0.05)  # no time for a boot
    assert costs[9] == pytest.approx(5 * 0.5 + 5 * 0.05)
    dear = slot_costs(up, usd, 1.0, np.array([0.0, 10.0, 0.0]), 1)[0]
    assert dear[9] == pytest.approx(9 * 0.5)


def test_the_work_of_a_fleet_is_divided_among_its_slots_at_the_lowest_cost() -> None:
    costs = np.array([[0.0, 3.0, 3.5, 9.0], [0.0, 1.0, 4.0, 4.5]])
    everything = [
        min(costs[0, a] + costs[1, b] for a in range(4) for b in range(4) if a + b >= work) for work in range(7)
    ]
    assert [fleet_cost(costs, work) for work in range(7)] == pytest.approx(everything)
    assert fleet_cost(costs, 7) == np.inf


def test_a_boot_between_ticks_is_refused() -> None:
    assert boot_ticks(360.0, 180.0) == 2
    with pytest.raises(ConfigError, match="multiple of --tick"):
        boot_ticks(90.0, 180.0)


def recorded(count: int, seed: int = 0, hours: float = 60.0, machine: str = "big") -> TraceSet:
    rng = np.random.default_rng(seed)
    pools = []
    for number in range(count):
        times = np.append(np.arange(0.0, hours, 1.0), hours) * 3600.0
        up = (rng.random(len(times)) < 0.75).astype(float)
        price = Series(times, rng.uniform(0.1, 0.25, len(times)))
        pools.append(Pool(f"region-{number}", 1, 0.286, price, Series(times, up), machine))
    return TraceSet("recorded", tuple(pools))


SETTINGS = BacktestSettings(rates_per_s=(125.0,) * 4, windows=3, deadline_ratios=(1.1, 1.5), job_hours=6.0)


def test_no_policy_is_cheaper_than_the_optimum_and_the_planner_meets_every_deadline() -> None:
    regions = RegionSettings(3, 0.02, Traffic(start_bytes=1e8))
    for ratio in SETTINGS.deadline_ratios:
        rows = {row.policy: row for row in backtest_regions(recorded(4), ratio, SETTINGS, regions)}
        assert {"uniform-progress", "skynomad-like", "policy-selector", "adaptive", "adaptive-home-only"} <= set(rows)
        in_time = [row for row in rows.values() if row.met_percent == 100]
        assert all(row.over_bound >= 1 - 1e-9 for row in in_time if not row.policy.endswith("home-only"))
        assert rows["adaptive"].met_percent == 100
        assert rows["adaptive"].cost_percent < rows["adaptive-home-only"].cost_percent < 100


def test_traffic_keeps_the_planner_at_home_where_it_costs_more_than_spot_saves() -> None:
    """A policy that sends each gradient across regions stays at home; one that rarely sends uses all regions."""

    def away(traffic: Traffic) -> float:
        regions = RegionSettings(3, 0.02, traffic)
        rows = {row.policy: row for row in backtest_regions(recorded(3), 1.5, SETTINGS, regions)}
        return rows["adaptive"].cost_percent - rows["adaptive-home-only"].cost_percent

    assert away(Traffic(40_000, 40_000, 1e7)) == pytest.approx(0.0, abs=1e-9)  # 0.72 USD/h away from home
    assert away(Traffic(40, 40, 1e7)) < -2


def test_a_lost_machine_is_replaced_in_the_cheapest_region_that_has_one() -> None:
    up = np.ones((3, 20, 2), np.bool_)
    up[0, 5:] = False
    usd = np.array([[0.1] * 20, [0.3] * 20, [0.2] * 20])
    seen: list[Machines] = []

    class Watched(AdaptiveRegions):
        def decide(self, sight: Sight) -> Machines:
            seen.append(super().decide(sight)[0])
            return seen[-1][None]

    outcome = replay_regions(Watched(), jobs(up, usd, work=24))
    assert {int(each) for each in seen[4]} == {0}
    assert {int(each) for each in seen[5]} == {2}
    assert outcome.moves[0] == 2
    assert outcome.usd[0] == pytest.approx(2 * (5 * 0.1 + 8 * 0.2) * TICK_S / 3600)  # with one tick of a boot


def test_the_selector_follows_the_best_policy_of_its_pool() -> None:
    count, full = 200, np.full(200, 10.0)
    good, bad, late = (
        Outcome(np.full(count, 100.0), np.full(count, 3.0), np.zeros(count)),
        Outcome(np.full(count, 100.0), np.full(count, 9.0), np.ones(count)),
        Outcome(np.full(count, 101.0), np.full(count, 1.0), np.ones(count)),
    )
    online, hindsight = selected([bad, good, late], full, 100.0, np.random.default_rng(0))
    assert (hindsight.usd == 3.0).all()
    assert online.usd[100:].mean() < 3.2
    assert (online.finish_s[100:] <= 100.0).mean() > 0.95


def test_every_rival_runs_on_the_same_jobs() -> None:
    up = np.random.default_rng(1).random((2, 60, 3)) < 0.6
    job = jobs(up, np.full((2, 60), 0.4), work=3 * 40)
    best = optimum_usd(job)[0]
    for policy in [*rivals(), *pool()]:
        outcome = replay_regions(policy, job)
        assert outcome.usd[0] >= best - 1e-9 or outcome.finish_s[0] > job.deadline_s, policy.name
        assert np.isfinite(outcome.finish_s).all()


def test_a_set_without_enough_pools_of_one_kind_of_machine_is_named() -> None:
    mixed = TraceSet("mixed", (*recorded(1).pools, *recorded(1, machine="small").pools))
    assert "expected 2 pools of one kind of machine" in few_regions(mixed, SETTINGS, 2)
    assert few_regions(recorded(2), SETTINGS, 2) == ""
    apart = replace(recorded(1).pools[0], price=constant(0.1, 1e6, 1.2e6), num_up=constant(1.0, 1e6, 1.2e6))
    assert few_regions(TraceSet("apart", (*recorded(1).pools, apart)), SETTINGS, 2) != ""
