"""Bills: rules as data, the same however often they are made, set beside what on-demand would have cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from benchmarks.paper.formulas import on_demand_runtime_s
from doll.provisioner.billing import (
    EC2_LINUX,
    LOCAL,
    Bill,
    all_on_demand_usd,
    bill,
    bill_lines,
    usd_per_1000_updates,
    usd_per_error_point,
)
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState
from doll.provisioner.planning.state import Market
from doll.provisioner.traces.model import Series, constant
from doll.theory.cost import SECONDS_PER_HOUR, work_samples
from hypothesis import given
from hypothesis import strategies as st

T0 = 1_700_000_000.0


def machine(
    id_: str = "i", *, seconds: float | None = None, end: EndReason = EndReason.TERMINATED, **more: Any
) -> Instance:
    """An instance that began at T0 and ran for `seconds`, or still runs."""
    ended = {} if seconds is None else {"ended_s": T0 + seconds, "end_reason": end}
    given: dict[str, Any] = (
        {"slot": 0, "incarnation": 1, "market": "spot", "pool": "a", "launched_s": T0} | ended | more
    )
    state = InstanceState.RUNNING if seconds is None else InstanceState.ENDED
    return Instance(id=id_, state=state, **given)


def flat(pool: str, market: Market, start_s: float, end_s: float) -> Series:
    return constant(3.6 if market == "spot" else 7.2, start_s, end_s)  # 0.001 and 0.002 USD per second


def usd(instance: Instance, rule: Any = EC2_LINUX, now_s: float = T0 + 1e6) -> float:
    return bill([instance], flat, rule, now_s).usd


@pytest.mark.parametrize(
    ("seconds", "billed"), [(0.0, 60), (1.0, 60), (60.0, 60), (60.4, 61), (61.0, 61), (3600.0, 3600)]
)
def test_ec2_bills_by_the_second_and_a_minute_at_least(seconds: float, billed: int) -> None:
    assert usd(machine(seconds=seconds)) == pytest.approx(billed * 0.001)
    assert usd(machine(seconds=seconds, market="on_demand")) == pytest.approx(billed * 0.002)


def test_the_local_market_bills_time_as_it_is() -> None:
    assert usd(machine(seconds=12.5), LOCAL) == pytest.approx(0.0125)
    assert usd(machine(seconds=0.0), LOCAL) == 0.0


@pytest.mark.parametrize(
    ("seconds", "end", "market", "free"),
    [
        (3599.0, EndReason.INTERRUPTED, "spot", True),
        (3600.0, EndReason.INTERRUPTED, "spot", False),
        (3599.0, EndReason.TERMINATED, "spot", False),
        (3599.0, EndReason.FAILED, "spot", False),
        (3599.0, EndReason.INTERRUPTED, "on_demand", False),
    ],
)
def test_only_what_ec2_takes_back_in_its_first_hour_is_free(
    seconds: float, end: EndReason, market: Any, free: bool
) -> None:
    total = bill([machine(seconds=seconds, end_reason=end, market=market)], flat, EC2_LINUX, T0 + 1e6)
    assert (total.usd == 0, total.free) == (free, int(free))


def test_what_runs_is_billed_until_now() -> None:
    assert usd(machine(), now_s=T0 + 100) == pytest.approx(0.1)
    assert usd(machine(), now_s=T0 - 5) == pytest.approx(0.06)  # a clock that is behind


def test_one_that_waits_for_a_node_costs_nothing_until_it_has_one() -> None:
    assert usd(machine(seconds=600.0, costs_from_s=T0 + 600.0), LOCAL) == 0.0
    assert usd(machine(seconds=600.0, costs_from_s=T0 + 600.0), EC2_LINUX) == 0.0, "no minimum either"
    assert usd(machine(costs_from_s=T0 + 100.0), LOCAL, T0 + 100.0) == 0.0
    assert usd(machine(seconds=600.0, costs_from_s=T0 + 100.0), LOCAL) == pytest.approx(0.5)


def test_each_instance_counts_once_and_the_sum_is_by_market() -> None:
    both = [machine("a", seconds=100.0), machine("b", seconds=200.0, market="on_demand"), machine("a", seconds=100.0)]
    total = bill(both, flat, EC2_LINUX, T0)
    assert total.usd == pytest.approx(0.5)
    assert total.usd_by_market == pytest.approx({"spot": 0.1, "on_demand": 0.4})
    assert total.hours_by_market == pytest.approx({"spot": 100 / 3600, "on_demand": 200 / 3600})
    assert (total.instances, [line.id for line in total.lines]) == (2, ["a", "b"])
    assert Bill(**total.to_dict()).usd == total.usd, "it comes back from a file"
    again = Bill.total(total.lines, total)
    assert (again.usd, again.instances) == (pytest.approx(1.0), 4)


def test_without_boots_and_overlap() -> None:
    instance = machine("a", seconds=100.0)
    total = Bill.total(bill_lines([instance], flat, LOCAL, T0, ready_s={"a": T0 + 30}, fenced_s={"a": T0 + 90}))
    assert total.usd == pytest.approx(0.1)
    assert total.usd_without_boots == pytest.approx(0.06)
    assert bill([instance], flat, LOCAL, T0).usd_without_boots == 0.0, "nobody knows that its worker was ever ready"


@given(
    st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 5)), min_size=1, max_size=6),
    st.floats(0, 3000),
    st.floats(0.5, 3000),
)
def test_the_mean_price_over_time_is_what_is_paid(
    steps: list[tuple[float, float]], start: float, seconds: float
) -> None:
    """Against the integral of the step function, taken second by second."""
    edges = np.cumsum([0.0, *(length for length, _ in steps)]) + T0
    series = Series(edges, np.array([*(value for _, value in steps), steps[-1][1]]))
    instance = machine(seconds=start + seconds, launched_s=T0 + start)
    (line,) = bill_lines([instance], lambda *_: series, LOCAL, T0)
    assert line.usd == pytest.approx(series.mean(T0 + start, T0 + start + seconds) * seconds / 3600, abs=1e-9)


def test_many_at_once_cost_what_each_costs_alone() -> None:
    times = np.array([T0, T0 + 50, T0 + 120, T0 + 1000])
    series = Series(times, np.array([1.0, 5.0, 2.0, 2.0]))
    machines = [machine(str(n), seconds=40.0 + 17 * n, launched_s=T0 + 13 * n) for n in range(9)]
    together = bill_lines(machines, lambda *_: series, EC2_LINUX, T0)
    alone = [bill_lines([instance], lambda *_: series, EC2_LINUX, T0)[0] for instance in machines]
    assert [line.usd for line in together] == pytest.approx([line.usd for line in alone])


def test_on_demand_is_the_papers_cost() -> None:
    """Eq. (5): all on-demand for θ_0."""
    samples = work_samples(10_000, 20, 256)
    usd = all_on_demand_usd(samples, np.full(64, 125.0), 0.286)
    assert usd == pytest.approx(64 * 0.286 * on_demand_runtime_s(samples, 125, 64) / SECONDS_PER_HOUR)


def test_ratios() -> None:
    assert usd_per_1000_updates(2.0, 500) == 4.0
    assert math.isnan(usd_per_1000_updates(2.0, 0))
    assert usd_per_error_point(3.0, 0.9, 0.6) == pytest.approx(0.1)
    assert math.isnan(usd_per_error_point(3.0, 0.6, 0.6))
    assert all(rule.source and rule.as_of for rule in (EC2_LINUX, LOCAL))
