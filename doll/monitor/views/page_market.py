"""The market of a job on the page: prices, what its machines cost, and which worker ran on which of them. Pure."""

from __future__ import annotations

import math
from typing import Any

from doll.amounts import usd
from doll.monitor.state.formats import known, of
from doll.monitor.state.market_history import MarketPoint
from doll.monitor.state.watched_job import PageState

_CURVES = ("spent_usd", "all_on_demand_usd", "spot_usd_per_h", "on_demand_usd_per_h")


def market(state: PageState) -> dict[str, Any]:
    """Empty without a provisioner, and before its first decision."""
    decision, history = state.decisions.newest, state.decisions.market
    if not history.points:
        return {}
    without_spot = state.report.get("spot_unavailable_s") or [[]] * len(history.spans)
    spans = {
        str(slot): [
            *([*gap, "unavailable"] for gap in gaps),
            *(
                [round(span.begin_s, 1), -1 if span.end_s is None else round(span.end_s, 1), span.market]
                for span in spans
            ),
        ]
        for slot, (spans, gaps) in enumerate(zip(history.spans, without_spot, strict=False))
    }
    return {
        "facts": [list(fact) for fact in _facts(decision, state.report) if fact[1]],
        "curves": {name: _curve(history.points, name) for name in _CURVES},
        "spans": spans,
        "now_s": round(decision.get("elapsed_s", 0.0), 1),
    }


def _facts(decision: Any, report: Any) -> list[tuple[str, str]]:
    def number(name: str) -> float:
        return float(decision.get(name, math.nan))

    spot, on_demand = number("spot_usd_per_h"), number("on_demand_usd_per_h")
    saved = f", {100 * spot / on_demand:.0f} % of on-demand" if known(spot) and on_demand > 0 else ""
    running = [market for market in decision.get("running", decision["markets"]) if market]
    without_notice = report.get("preemptions_without_notice")
    return [
        ("spot, per hour", f"{usd(spot)} USD{saved}" if known(spot) else ""),
        ("on-demand, per hour", f"{usd(on_demand)} USD" if known(on_demand) else ""),
        ("availability", f"{100 * number('availability'):.0f} % of the time" if known(number("availability")) else ""),
        (
            "workers",
            f"{running.count('spot')} spot, {running.count('on_demand')} on-demand, of {len(decision['markets'])}",
        ),
        ("interruptions", of(int(number("interruptions_total")), None) if known(number("interruptions_total")) else ""),
        ("without notice", "" if without_notice is None else f"{without_notice} of {report['preemptions']}"),
        ("moves", of(int(number("moves_total")), None) if known(number("moves_total")) else ""),
        ("predicted", f"{usd(report['cost_predicted_usd'])} USD" if "cost_predicted_usd" in report else ""),
    ]


def _curve(points: dict[int, MarketPoint], name: str) -> dict[str, list[float]]:
    """The points by their numbers, without those that repeat the one before: a price stays for hours."""
    curve: dict[str, list[float]] = {}
    rows = [(number, point.at_s, getattr(point, name)) for number, point in points.items()]
    for at, (number, at_s, value) in enumerate(rows):
        is_edge = at in (0, len(rows) - 1) or not value == rows[at - 1][2] == rows[at + 1][2]
        if known(value) and is_edge:
            curve[str(number)] = [round(at_s, 1), float(f"{value:.5g}")]
    return curve
