"""Replays of recorded markets: windows, baselines, bounds, and the planner against them."""

from __future__ import annotations

import itertools
import json
import signal
from dataclasses import replace

import numpy as np
import pytest
from doll.errors import ConfigError
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.traces.availability import slots_up
from doll.provisioner.traces.model import Pool, Series, TraceSet, constant
from doll.provisioner.traces.recordings import load
from flicker import flicker
from paths import SHARED_DATA

from doll_lab.backtests import baselines
from doll_lab.backtests.adaptive import Adaptive, backtest_policies, planners
from doll_lab.backtests.backtest import BacktestSettings, Outcome, backtest, replay
from doll_lab.backtests.backtest_report import to_json, verdict
from doll_lab.backtests.baselines import ON_DEMAND, SPOT, BacktestJob, MarketPolicy, Observation
from doll_lab.backtests.windows import Windows, clairvoyant_usd, sample

pytestmark = pytest.mark.slow  # simulations of whole jobs

HOUR_S = 3600.0


def windows(up: list[list[int]], price: list[float] | None = None, tick_s: float = HOUR_S) -> Windows:
    """One job: a row of ticks for each slot, 1 where a spot machine is there; on demand costs 1 USD/h."""
    there = np.array(up, dtype=np.bool_).T[None]
    ticks = there.shape[1]
    prices = np.array([price or [0.25] * ticks])
    return Windows(
        up=there, price=prices, on_demand=np.ones(1), pool_alpha=np.array([there.mean()]),
        pool_price=prices.mean(axis=1), pools=("p",), start_s=np.zeros(1), tick_s=tick_s,
    )  # fmt: skip


def job(market: Windows, *, hours: float, deadline_hours: float, boot_s: float = 0.0) -> BacktestJob:
    """`hours`: θ_0, with one sample per second and slot."""
    n = market.up.shape[2]
    return BacktestJob(
        samples=n * hours * HOUR_S, deadline_s=deadline_hours * HOUR_S, rates_per_s=np.ones(n), boot_s=boot_s,
        tick_s=market.tick_s, on_demand=market.on_demand, pool_alpha=market.pool_alpha, pool_price=market.pool_price,
    )  # fmt: skip


def run(policy: MarketPolicy, market: Windows, **shape: float) -> Outcome:
    return replay(policy, job(market, **shape), market)


# --- windows --------------------------------------------------------------------------------------------------------


def test_slots_follow_the_recorded_share_and_none_is_luckier_by_its_number() -> None:
    rng = np.random.default_rng(1)
    times = np.arange(4000.0)
    counts = rng.integers(0, 9, 4000).astype(float)
    pool = Pool("p", 8, 1.0, constant(0.1, 0.0, 4000.0), Series(times, counts))
    up = slots_up(pool, times, 16, rng)
    assert up.sum(axis=1).tolist() == (2 * counts).tolist()
    shares = up.mean(axis=0)
    assert shares.max() - shares.min() < 0.12
    # No more slots change than the count does: machines do not swap their fates.
    assert (np.abs(np.diff(up.astype(int), axis=0)).sum(axis=1) == np.abs(np.diff(2 * counts))).all()


def test_windows_take_pools_in_turn_and_stay_inside_their_recordings() -> None:
    traces = flicker(1, hours=40.0)
    sampled = sample(traces, count=10, length_s=10 * HOUR_S, tick_s=600.0, num_slots=4, rng=np.random.default_rng(2))
    assert sorted(sampled.pools).count("a") == 5
    assert sampled.up.shape == (10, 60, 4)
    assert (sampled.start_s >= 0).all()
    assert (sampled.start_s <= 30 * HOUR_S).all()
    again = sample(traces, count=10, length_s=10 * HOUR_S, tick_s=600.0, num_slots=4, rng=np.random.default_rng(2))
    assert (again.up == sampled.up).all()
    with pytest.raises(ConfigError, match="the longest has 144000 s"):
        sample(traces, count=1, length_s=41 * HOUR_S, tick_s=600.0, num_slots=4, rng=np.random.default_rng(2))


def test_the_clairvoyant_is_the_cheapest_of_all_plans() -> None:
    """Against every way to fill whole ticks of two slots, with unequal rates."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        market = windows(rng.integers(0, 2, (2, 4)).tolist(), price=rng.uniform(0.1, 1.3, 4).tolist())
        rates = np.array([1.0, 2.0])
        work = float(rng.integers(1, 12)) * HOUR_S
        cheapest = np.inf
        for chosen in itertools.product((0, 1), repeat=8):
            on = np.array(chosen).reshape(4, 2)
            if (on * rates).sum() * HOUR_S >= work - 1e-6:
                price = np.where(market.up[0], np.minimum(market.price[0][:, None], 1.0), 1.0)
                cheapest = min(cheapest, float((on * price).sum()))
        bound = float(clairvoyant_usd(market, rates_per_s=rates.tolist(), samples=work, deadline_s=4 * HOUR_S)[0])
        assert bound <= cheapest + 1e-9
        if cheapest < np.inf:
            assert bound >= cheapest - 1.0  # it may take a part of one slot's tick
        else:
            assert bound == np.inf


# --- replay and baselines -------------------------------------------------------------------------------------------


def test_all_on_demand_takes_the_whole_time_and_price() -> None:
    outcome = run(baselines.AllOnDemand(), windows([[0] * 6, [1] * 6]), hours=4.0, deadline_hours=5.0)
    assert outcome.finish_s.tolist() == pytest.approx([4 * HOUR_S])
    assert outcome.usd.tolist() == pytest.approx([8.0])
    assert outcome.moves.tolist() == [0.0]


def test_all_spot_costs_only_while_it_is_up_and_what_is_late_is_done_on_demand() -> None:
    market = windows([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
    outcome = run(baselines.AllSpot(), market, hours=3.0, deadline_hours=6.0)
    # Six slot-hours: two slots for two hours, one for two.
    assert outcome.finish_s.tolist() == pytest.approx([4 * HOUR_S])
    assert outcome.usd.tolist() == pytest.approx([6 * 0.25])
    late = run(baselines.AllSpot(), market, hours=5.5, deadline_hours=6.0)
    assert late.finish_s.tolist() == pytest.approx([6.5 * HOUR_S])
    assert late.usd.tolist() == pytest.approx([10 * 0.25 + 1.0])


def test_a_machine_that_comes_back_boots_first_and_its_boot_costs() -> None:
    outcome = run(baselines.AllSpot(), windows([[1, 0, 1, 1]]), hours=2.0, deadline_hours=4.0, boot_s=1800.0)
    assert outcome.finish_s.tolist() == pytest.approx([3.5 * HOUR_S])
    assert run(
        baselines.AllSpot(), windows([[1, 0, 1, 1]]), hours=1.5, deadline_hours=4.0, boot_s=1800.0
    ).usd.tolist() == (pytest.approx([0.5]))


def test_static_puts_as_many_slots_on_spot_as_theorem_4() -> None:
    """alpha 0.9, θ / θ_0 = 1.05: 30 of 64 (digest 1.6)."""
    market = windows([[1] * 10] * 64)
    policy = baselines.Static()
    policy.start(replace(job(market, hours=9.0, deadline_hours=9.45), pool_alpha=np.array([0.9])))
    zero, ones = np.zeros((1, 64)), np.ones((1, 64), bool)
    moment = Observation(0.0, zero[:, 0], zero, market.up[:, 0], np.full((1, 64), SPOT), ones, market.price[:, 0])
    assert int((policy.decide(moment) == SPOT).sum()) == 30


def test_greedy_waits_until_the_slack_is_gone_then_stays_on_demand() -> None:
    market = windows([[0] * 25 + [1] * 15] * 2, tick_s=360.0)
    outcome = run(baselines.Greedy(), market, hours=2.0, deadline_hours=4.0)
    assert outcome.finish_s.tolist() == pytest.approx([4.0 * HOUR_S])
    assert outcome.usd.tolist() == pytest.approx([4.0])
    assert outcome.moves.tolist() == [2.0]


def moment(policy: MarketPolicy, the_job: BacktestJob, *, now_h: float, done_h: float, up: int, on_demand: bool) -> int:
    """What a policy chooses for the only slot, `done_h` hours of work into a job."""
    choice = np.full((1, 1), ON_DEMAND if on_demand else SPOT)
    done = np.array([done_h * HOUR_S])
    seen = Observation(
        now_h * HOUR_S, done, done[None], np.array([[bool(up)]]), choice, np.array([[True]]), np.array([0.25])
    )
    return int(policy.decide(seen)[0, 0])


@pytest.mark.parametrize("policy", [baselines.UniformProgress, baselines.UniformProgressPerSlot])
@pytest.mark.parametrize(
    ("now_h", "done_h", "up", "on_demand", "expected"),
    [
        (4.0, 1.0, 1, False, SPOT),  # behind, but spot is there: take the risk
        (4.0, 1.9, 0, False, ON_DEMAND),  # behind and idle: catch up
        (4.0, 2.1, 0, False, SPOT),  # ahead: wait
        (4.0, 1.9, 1, True, ON_DEMAND),  # behind on on-demand: stay though spot is there
        (4.0, 2.1, 1, True, ON_DEMAND),  # not ahead by two change-overs: stay
        (4.0, 2.3, 1, True, SPOT),  # ahead by more: go back
        (9.0, 4.3, 0, False, ON_DEMAND),  # no slack left: safety net
    ],
)
def test_uniform_progress_follows_its_rules(
    policy: type[baselines.UniformProgress], now_h: float, done_h: float, up: int, on_demand: bool, expected: int
) -> None:
    """Five hours of work in ten: the line rises half an hour per hour; a change-over takes 12 minutes."""
    the_job = job(windows([[1] * 100], tick_s=360.0), hours=5.0, deadline_hours=10.0, boot_s=720.0)
    made = policy()
    made.start(the_job)
    if now_h == 9.0:
        done_h = 5.0 - 1.0 + 0.4
    assert moment(made, the_job, now_h=now_h, done_h=done_h, up=up, on_demand=on_demand) == expected


def test_a_slot_with_its_share_done_is_given_back() -> None:
    the_job = job(windows([[1] * 100], tick_s=360.0), hours=5.0, deadline_hours=10.0)
    made = baselines.UniformProgressPerSlot()
    made.start(the_job)
    assert moment(made, the_job, now_h=6.0, done_h=5.0, up=1, on_demand=False) == baselines.OFF


# --- the planner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1.05, 1.3])
def test_the_planner_meets_every_deadline_and_beats_on_demand(ratio: float) -> None:
    settings = BacktestSettings(rates_per_s=(125.0,) * 8, job_hours=12.0, deadline_ratios=(ratio,), windows=12)
    rows = {row.policy: row for row in backtest([flicker(3)], settings, backtest_policies)}
    assert rows["adaptive"].met_percent == 100.0
    assert rows["adaptive"].cost_percent < 90.0
    assert rows["all-spot"].met_percent < 100.0
    assert rows["on-demand"].cost_percent == pytest.approx(100.0)
    assert all(row.over_bound >= 1.0 for row in rows.values() if row.met_percent == 100.0)
    assert rows["adaptive"].over_bound < rows["on-demand"].over_bound


@pytest.mark.parametrize("boot_s", [60.0, 600.0])
def test_long_boots_cost_no_more_than_the_best_rival(boot_s: float) -> None:
    """With 600 s the planner once was 9.3 points above."""
    settings = BacktestSettings(
        rates_per_s=(125.0,) * 8, job_hours=12.0, deadline_ratios=(1.1,), windows=12, boot_s=boot_s
    )
    rows = backtest([flicker(3)], settings, lambda: [*baselines.baselines(), planners()[0]])
    result = verdict(rows)
    assert result.all_met
    assert result.worst_points < 1.0


def test_the_guard_is_what_meets_deadlines() -> None:
    """All spot capacity vanishes and stays away: without the guard the slack of boots and decisions is missing."""
    up = [[1] * 56 + [0] * 10] * 4
    market = windows(up, tick_s=600.0)
    shape = {"hours": 10.0, "deadline_hours": 10.5, "boot_s": 600.0}
    outcomes = {made.name: run(made, market, **shape) for made in planners()}
    assert outcomes["adaptive"].finish_s[0] <= 10.5 * HOUR_S
    assert outcomes["adaptive-no-guard"].finish_s[0] > 10.5 * HOUR_S


def test_a_set_meets_the_same_windows_whatever_is_replayed_beside_it() -> None:
    settings = BacktestSettings(rates_per_s=(125.0,) * 4, job_hours=6.0, deadline_ratios=(1.1,), windows=4)
    one, two = flicker(3), TraceSet("another", flicker(4).pools)
    alone = backtest([one], settings, lambda: [Adaptive("adaptive")])
    beside = backtest([two, one], settings, lambda: [Adaptive("adaptive")])
    assert beside[1:] == alone


def test_a_market_that_gives_machines_away_has_finite_figures() -> None:
    flat = Pool("free", 4, 0.2, constant(0.0, 0.0, 4e5), constant(4.0, 0.0, 4e5))
    rows = backtest([TraceSet("free", (flat,))], BacktestSettings(rates_per_s=(1.0,) * 4, windows=1), backtest_policies)
    over = {row.policy: row.over_bound for row in rows}
    assert over["all-spot"] == 1.0
    assert 1 < over["on-demand"] < float("inf")


def test_a_short_recording_shortens_the_job() -> None:
    settings = BacktestSettings(rates_per_s=(125.0,) * 4, job_hours=12.0, deadline_ratios=(1.1, 1.5), windows=4)
    rows = backtest([flicker(3, hours=5.0)], settings, lambda: [baselines.AllOnDemand()])
    assert [row.met_percent for row in rows] == [100.0, 100.0]


def test_two_processes_give_the_same_rows_and_say_how_far_they_are() -> None:
    settings = BacktestSettings(rates_per_s=(125.0,) * 4, job_hours=6.0, deadline_ratios=(1.1, 1.3), windows=3)
    heard: list[str] = []
    sets = [flicker(3), TraceSet("another", flicker(4).pools)]
    rows = backtest(sets, settings, backtest_policies, processes=2, progress=heard.append)
    assert rows == backtest(sets, settings, backtest_policies)
    assert heard == ["flicker x 1.1", "flicker x 1.3", "another x 1.1", "another x 1.3"]


def test_processes_end_where_the_caller_only_notes_sigterm() -> None:
    settings = BacktestSettings(rates_per_s=(125.0,) * 4, job_hours=6.0, deadline_ratios=(1.1, 1.3), windows=1)
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        assert backtest([flicker(3)], settings, lambda: [baselines.AllOnDemand()], processes=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not noted


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data sets are not beside this checkout")
def test_the_planner_holds_its_bars_on_the_shared_recordings() -> None:
    sets = load(SHARED_DATA / "spot_traces_skypilot") + load(SHARED_DATA / "preempt_bamboo")
    rows = backtest(sets, BacktestSettings(windows=4), backtest_policies, processes=2)
    result = verdict(rows)
    assert result.all_met
    # Of four jobs a set; one deadline of one set may be unlucky.
    assert max(result.points_by_set.values()) <= 5.0
    assert result.worst_points <= 10.0
    assert result.moves_share < 1 / 3
    assert result.ok
    assert json.loads(json.dumps(to_json(rows, BacktestSettings(windows=4))))["verdict"]["ok"] is True


def test_rule_mix_is_theorem_4_for_the_recording_s_mean_availability() -> None:
    rng = np.random.default_rng(8)
    rule = PlannerSettings(
        samples=1, batch_size=1, deadline_s=1.0, rule="mix", margin=0.0, cycle_s=HOUR_S, spot_stable_s=0.0
    )
    counts = set()
    for _ in range(20):
        market = windows((rng.random((8, 40)) < 0.8).astype(int).tolist(), tick_s=600.0)
        shape = {"hours": 4.0, "deadline_hours": 4.0 * float(rng.uniform(1.02, 1.2))}
        assert run(Adaptive("mix", rule), market, **shape).moves[0] == 0
        # Slots of one rate are alike, so both may choose others, but not more or fewer.
        mix = _spot_at_first(Adaptive("mix", rule), market, shape)
        assert mix == _spot_at_first(baselines.Static(), market, shape)
        counts.add(mix)
    assert len(counts) > 3


def _spot_at_first(policy: MarketPolicy, market: Windows, shape: dict[str, float]) -> int:
    one = job(market, **shape)
    policy.start(one)
    up, zeros = market.up[:, 0], np.zeros(market.up[:, 0].shape)
    choice = np.full(up.shape, SPOT)
    chosen = policy.decide(Observation(0.0, np.zeros(1), zeros, up, choice, up, market.price[:, 0]))
    return int((chosen == SPOT).sum())
