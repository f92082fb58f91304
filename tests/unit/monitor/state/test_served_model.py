"""What a model server says over time."""

from __future__ import annotations

import math

import pytest
from doll.monitor.state.served_model import Reading, ServedModel, quantile
from doll.monitor.views.page_parts import served


def reading(at_s: float, fast: int, slow: int = 0, **fields: object) -> Reading:
    """After `fast` requests of at most 10 ms and `slow` ones of at most 100 ms."""
    values = {"versions": (3,), "age_s": 65.0, "samples_behind": 40.0, "waiting": 0.0, "is_stale": False, "swaps": 2.0}
    total = float(fast + slow)
    buckets = [(0.01, float(fast)), (0.1, total), (math.inf, total)]
    return Reading(at_s=at_s, requests={"200": total}, buckets=buckets, **{**values, **fields})  # type: ignore[arg-type]


def test_latencies_are_of_the_time_between_two_readings() -> None:
    model = ServedModel()
    model.add(reading(100.0, 1_000))
    assert served(model)["curves"]["per_s"] == {}
    model.add(reading(102.0, 1_000, 100))
    assert model.last is not None
    assert (model.last.at_s, model.last.per_s) == (2.0, 50.0)
    assert model.last.median_s == pytest.approx(0.055), "the many fast ones came before"
    model.add(reading(104.0, 1_000, 100))
    assert [interval.per_s for interval in model.intervals.values()] == [50.0, 0.0]
    assert list(served(model)["curves"]["p99_ms"]) == ["0"], "of no requests there is no latency"
    assert dict(served(model)["facts"])["latency"] == "median 55 ms, 99 % below 99.1 ms"


def test_a_server_that_began_again_counts_from_zero() -> None:
    model = ServedModel()
    model.add(reading(0.0, 1_000))
    model.add(reading(1.0, 30))
    assert model.last is not None
    assert model.last.per_s == 30.0


def test_what_it_says_of_versions() -> None:
    model = ServedModel()
    model.add(reading(0.0, 5, versions=(4, 3, 4), is_stale=True, waiting=2.0))
    facts = dict(served(model)["facts"])
    assert (facts["versions"], facts["made"], facts["waiting"]) == ("3, 4", "1:05 ago", "2")
    assert facts["stale"] == "a newer version may not have been seen"
    assert served(None) == {}


def test_a_quantile_is_found_within_its_bucket() -> None:
    assert quantile([(1.0, 10.0), (2.0, 20.0), (math.inf, 20.0)], 0.25) == 0.5
    assert quantile([(1.0, 0.0), (2.0, 0.0), (math.inf, 4.0)], 0.5) == 2.0, "the last bound that there is"
    assert math.isnan(quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5))
    assert math.isnan(quantile([], 0.5))
