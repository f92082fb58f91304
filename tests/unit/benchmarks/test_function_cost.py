"""Cost of functions and machines, and Perf/$: MLLess's published figures."""

from __future__ import annotations

import pytest
from benchmarks.paper.function_cost import FunctionPrices, functions_usd, machines_usd, perf_per_usd


def test_functions_cost_their_time_and_their_services() -> None:
    usd = functions_usd(worker_s=24 * 367.0, supervisor_s=367.0, duration_s=367.0)
    assert usd == pytest.approx(3.4e-5 * 25 * 367 + 367 * (0.15 + 0.17) / 3600)
    assert perf_per_usd(367.0, usd) == pytest.approx(0.0079, abs=0.00005)
    free = FunctionPrices(function_usd_per_s=0, broker_usd_per_h=0, store_usd_per_h=3600.0)
    assert functions_usd(10, 10, 2, free) == 2


def test_machines_are_billed_by_time_or_by_started_hours() -> None:
    assert machines_usd(6, 1800, 0.2) == pytest.approx(0.6)
    assert machines_usd(1, 61.6, 1.948, step_s=3600) == 1.948
    assert machines_usd(1, 3600, 1.948, step_s=3600) == 1.948, "a whole hour is one hour"
    assert machines_usd(2, 3601, 1.0, step_s=3600) == 4.0


@pytest.mark.parametrize(("perf", "seconds"), [(6.77e-3, 75.8), (8.34e-3, 61.6)])
def test_table_7_follows_from_a_whole_hour_of_the_gpu(perf: float, seconds: float) -> None:
    assert perf_per_usd(seconds, machines_usd(1, seconds, 1.948, step_s=3600)) == pytest.approx(perf, rel=0.002)


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="cost_usd"):
        perf_per_usd(1.0, 0.0)
    with pytest.raises(ValueError, match="count"):
        machines_usd(0, 1.0, 1.0)
    with pytest.raises(ValueError, match="broker_usd_per_h"):
        FunctionPrices(broker_usd_per_h=-1)
