"""Who ran on which market when, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doll.monitor.state import market_history
from doll.monitor.state.market_history import MarketHistory


def decision(at_s: float, *markets: str, running: Sequence[str] | None = None, **numbers: float) -> dict[str, Any]:
    known = {} if running is None else {"running": list(running)}
    return {"elapsed_s": at_s, "markets": list(markets), **known, **numbers}


def spans(history: MarketHistory, slot: int) -> list[tuple[float, float | None, str]]:
    return [(span.begin_s, span.end_s, span.market) for span in history.spans[slot]]


def test_a_span_lasts_until_the_market_changes_or_the_worker_is_gone() -> None:
    history = MarketHistory()
    for at_s, running in enumerate(["spot", "spot", "", "on_demand", "spot"]):
        history.feed(decision(at_s, "spot", running=[running]))
    assert spans(history, 0) == [(0, 2, "spot"), (3, 4, "on_demand"), (4, None, "spot")]


def test_a_topic_says_what_is_wanted_and_the_journal_what_runs() -> None:
    history = MarketHistory()
    history.feed(decision(1.0, "spot", "on_demand"))
    history.feed(decision(1.0, "spot", "on_demand", running=["spot", ""]))
    assert (spans(history, 0), spans(history, 1)) == ([(1.0, None, "spot")], [])
    assert len(history.points) == 1


def test_points_and_spans_are_bounded_and_points_stay_what_they_are() -> None:
    history = MarketHistory()
    for at_s in range(5_000):
        history.feed(decision(at_s, running=["spot" if at_s % 2 else "on_demand"], spent_usd=2.0 * at_s))
    assert len(history.spans[0]) == market_history.MAX_SPANS
    assert market_history.MAX_POINTS / 2 <= len(history.points) <= market_history.MAX_POINTS
    assert all(point.spent_usd == 2.0 * number == 2.0 * point.at_s for number, point in history.points.items())


def test_a_job_that_begins_again_has_a_new_history() -> None:
    history = MarketHistory()
    history.feed(decision(10.0, "spot"))
    history.feed(decision(0.0, "on_demand"))
    assert spans(history, 0) == [(0.0, None, "on_demand")]


def test_of_many_workers_fewer_spans_are_kept() -> None:
    history = MarketHistory()
    for at_s in range(40):
        history.feed(decision(at_s, running=["spot" if at_s % 2 else "on_demand"] * 1_000))
    assert sum(map(len, history.spans)) == market_history.MAX_SPANS_IN_ALL
