"""A backtest in several regions: the planner and its rivals on the same jobs, relative to the optimum."""

from __future__ import annotations

import numpy as np
from doll.provisioner.traces.model import TraceSet

from doll_lab.backtests.adaptive import ADAPTIVE
from doll_lab.backtests.backtest import BacktestSettings, Row
from doll_lab.backtests.region_rivals import pool, rivals, selected
from doll_lab.backtests.regions import AdaptiveRegions, RegionSettings, optimum_usd, replay_regions, sample_jobs


def backtest_regions(
    trace_set: TraceSet, ratio: float, settings: BacktestSettings, regions: RegionSettings
) -> list[Row]:
    """Run all policies on the jobs of one trace set with one deadline. `over_bound` is relative to the optimum."""
    jobs = sample_jobs(trace_set, ratio, settings, regions)
    full_usd = jobs.work * jobs.tick_s * jobs.home_on_demand / 3600.0
    best_usd = optimum_usd(jobs)
    outcomes = {policy.name: replay_regions(policy, jobs) for policy in rivals()}
    outcomes["policy-selector"], outcomes["policy-selector-hindsight"] = selected(
        [replay_regions(policy, jobs) for policy in pool()], full_usd, jobs.deadline_s,
        np.random.default_rng((settings.seed, 2512)),
    )  # fmt: skip
    outcomes[f"{ADAPTIVE}-home-only"] = replay_regions(AdaptiveRegions(), jobs.at_home())
    outcomes[ADAPTIVE] = replay_regions(AdaptiveRegions(), jobs)
    return [
        Row(
            trace_set=trace_set.name, deadline_ratio=ratio, policy=name, jobs=jobs.num_jobs,
            met_percent=100.0 * float(np.mean(outcome.finish_s <= jobs.deadline_s * (1 + 1e-9))),
            cost_percent=100.0 * float(np.mean(outcome.usd / full_usd)), moves_per_job=float(np.mean(outcome.moves)),
            over_bound=float(np.mean(outcome.usd / best_usd)),
        )
        for name, outcome in outcomes.items()
    ]  # fmt: skip
