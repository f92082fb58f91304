"""The local spot market: intervals by seed, notices, surprises, prices in wall time, and the feed over it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from doll.errors import ConfigError
from doll.provisioner.planning.state import Market
from doll.provisioner.traces.market import AvailabilityInterval, MarketClock, SpotMarket, TracePrices
from doll.provisioner.traces.model import Pool, Series, constant
from doll.theory.cost import Prices

PRICES = Prices(0.158, 0.286)
OPENED_S = 1_700_000_000.0


def chain(slots: int = 4, **more: float) -> SpotMarket:
    return SpotMarket.chain(slots, PRICES, **{"alpha": 0.8, "cycle_s": 1000.0, "speed_up": 20.0, **more})  # type: ignore[arg-type]


def fixed(*spans: tuple[bool, float], **more: float) -> SpotMarket:
    """One slot with these spans, again and again."""
    return SpotMarket([itertools.cycle(spans)], constant(0.1, 0, 1), 0.3, name="fixed", alpha=0.5, **more)  # type: ignore[arg-type]


def intervals(market: SpotMarket, slot: int, until_s: float) -> list[AvailabilityInterval]:
    drawn = [market.interval(slot, 0.0)]
    while drawn[-1].end_s < until_s:
        drawn.append(market.interval(slot, drawn[-1].end_s))
    return drawn


def pool(num_up: list[float], price: list[float], machines: int = 4) -> Pool:
    times = np.arange(len(num_up) + 1, dtype=np.float64) * 100.0
    return Pool(
        "zone/type", machines, 0.3, Series(times, np.array([*price, price[-1]])), Series(times, np.array([*num_up, 0]))
    )


def test_spells_follow_each_other_and_alternate() -> None:
    for slot in range(4):
        drawn = intervals(chain(), slot, 3000.0)
        assert drawn[0].start_s == 0
        for before, after in itertools.pairwise(drawn):
            assert after.start_s == before.end_s
            assert after.up != before.up
            assert after.number == before.number + 1


def test_the_times_without_spot_end_with_what_is_asked() -> None:
    market = fixed((True, 30.0), (False, 10.0))
    assert market.gaps(0, 75.0) == [(30.0, 40.0), (70.0, 75.0)]
    assert market.gaps(0, 30.0) == []


def test_the_chain_is_up_a_share_alpha_of_market_time() -> None:
    drawn = [interval for slot in range(4) for interval in intervals(chain(), slot, 50_000.0)]
    up_s = sum(interval.end_s - interval.start_s for interval in drawn if interval.up)
    total_s = sum(interval.end_s - interval.start_s for interval in drawn)
    assert up_s / total_s == pytest.approx(0.8, abs=0.02)
    # Cycles of 1000 market seconds are 50 s of the wall.
    assert total_s / (len(drawn) / 2) == pytest.approx(50.0, rel=0.1)


def test_a_seed_decides_all_whatever_is_asked_for_first() -> None:
    one, other = chain(seed=3, no_notice_share=0.3), chain(seed=3, no_notice_share=0.3)
    late = other.interval(3, 900.0), other.interval(0, 900.0)
    assert intervals(one, 0, 1000.0) == intervals(other, 0, 1000.0)
    assert one.interval(3, 900.0) == late[0]
    assert one.interval(0, 900.0) == late[1]
    assert intervals(one, 0, 1000.0) != intervals(chain(seed=4, no_notice_share=0.3), 0, 1000.0)


def test_a_boundary_belongs_to_the_spell_that_begins() -> None:
    market = fixed((True, 40), (False, 20), speed_up=2.0, notice_s=3)
    assert market.interval(0, 19.999) == AvailabilityInterval(0, True, 0.0, 20.0, 23.0)
    assert market.interval(0, 20.0) == AvailabilityInterval(1, False, 20.0, 30.0, 30.0)
    assert market.is_up(0, 30.0)
    assert not market.is_up(0, 29.9)


def test_spans_of_one_kind_are_one_spell_and_an_endless_one_never_ends() -> None:
    market = fixed((True, 10), (True, 5), (False, 5))
    assert market.interval(0, 12.0).end_s == 15.0
    assert market.interval(0, 16.0).end_s == 20.0
    assert math.isinf(fixed((True, math.inf)).interval(0, 1e9).end_s)
    assert math.isinf(fixed((True, 10.0)).interval(0, 5.0).end_s)


def test_a_share_of_spells_ends_without_notice() -> None:
    ups = [
        interval
        for slot in range(4)
        for interval in intervals(chain(no_notice_share=0.25), slot, 20_000.0)
        if interval.up
    ]
    assert np.mean([interval.without_notice for interval in ups]) == pytest.approx(0.25, abs=0.04)
    assert {round(interval.taken_s - interval.end_s, 6) for interval in ups} == {0.0, 2.0}
    assert not any(interval.without_notice for interval in intervals(chain(), 0, 2000.0) if interval.up)


def test_a_replay_has_the_share_of_slots_that_the_recording_has_of_machines() -> None:
    market = SpotMarket.replay(pool([4, 1, 2, 0, 3], [0.1] * 5), 8, length_s=1.0, speed_up=10.0, seed=5)
    share = [sum(market.is_up(n, at_s) for n in range(8)) for at_s in np.arange(0.5, 100.0, 1.0)]
    # Two laps of 50 s each; where it starts, the seed has drawn. 8 slots for 4 machines.
    assert share[:50] == share[50:]
    assert sorted(set(share)) == [0, 2, 4, 6, 8]
    assert np.mean(share) == pytest.approx(4.0, abs=0.4)
    assert market.alpha == pytest.approx(0.5)


def test_a_replay_begins_where_enough_of_the_recording_is_left() -> None:
    recording = pool([4, 0, 4, 0, 4, 0, 4, 0], [0.1 * n for n in range(1, 9)])
    for seed in range(20):
        market = SpotMarket.replay(recording, 2, length_s=60.0, speed_up=10.0, seed=seed)
        assert market.spot_usd_per_h(0.0) / 10 < 0.35  # in the first 200 of 800 s
        assert market.spot_usd_per_h(0.0) == market.spot_usd_per_h(80.0)


def test_a_pool_that_never_changes_never_ends() -> None:
    market = SpotMarket.replay(pool([4, 4], [0.1, 0.2]), 3, length_s=1.0)
    assert all(math.isinf(market.interval(n, 0.0).end_s) and market.is_up(n, 1e6) for n in range(3))


def test_prices_are_per_wall_hour_so_that_the_bill_is_that_of_market_time() -> None:
    market, clock = chain(speed_up=20.0), MarketClock()
    clock.open(OPENED_S)
    feed = TracePrices(market, clock)
    assert feed.current(OPENED_S + 5) == Prices(0.158 * 20, 0.286 * 20)
    three_minutes = feed.series("any", "spot", OPENED_S, OPENED_S + 180.0)
    assert three_minutes.mean(OPENED_S, OPENED_S + 180.0) * 180 / 3600 == pytest.approx(0.158)  # an hour of the market


def test_nothing_is_billed_before_the_opening() -> None:
    market, clock = chain(speed_up=20.0), MarketClock()
    feed = TracePrices(market, clock)
    assert feed.series("any", "spot", OPENED_S - 50, OPENED_S).mean(OPENED_S - 50, OPENED_S) == 0.0
    assert clock.since(OPENED_S) == 0.0
    clock.open(OPENED_S)
    clock.open(OPENED_S + 99.0)  # only the first time counts
    assert clock.since(OPENED_S + 7) == 7.0
    assert clock.since(OPENED_S - 7) == 0.0
    prices: dict[Market, float] = {"spot": 0.158, "on_demand": 0.286}
    for name, usd_per_h in prices.items():
        price = usd_per_h * 20
        series = feed.series("any", name, OPENED_S - 30, OPENED_S + 10)
        assert series.mean(OPENED_S - 30, OPENED_S + 10) == pytest.approx(price / 4)


def test_the_price_series_has_every_change_also_over_the_end_of_the_recording() -> None:
    market, clock = (
        SpotMarket.replay(pool([4] * 4, [0.1, 0.2, 0.3, 0.4]), 1, length_s=1, speed_up=10, seed=1),
        MarketClock(),
    )
    clock.open(OPENED_S)
    series = TracePrices(market, clock).series("any", "spot", OPENED_S + 3, OPENED_S + 113)
    inner = series.times_s[1:-1] - OPENED_S
    assert len(inner) == 11
    assert np.allclose(np.diff(inner), 10.0)
    for time_s, value in zip(series.times_s[:-1], series.values, strict=False):
        assert value == market.spot_usd_per_h(time_s - OPENED_S + 1e-3)
    grid = np.arange(3.005, 113, 0.01)
    mean = np.mean([market.spot_usd_per_h(at_s) for at_s in grid])
    assert series.mean(OPENED_S + 3, OPENED_S + 113) == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"speed_up": 0.0}, {"notice_s": -1.0}, {"no_notice_share": 1.5}, {"alpha": 0.0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        chain(**wrong).interval(0, 0.0)
