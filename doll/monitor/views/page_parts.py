"""Two parts of the page: the market of a job (prices, cost of its machines, and the market of each worker), and its
model server (the versions that answer, and response times). Pure."""

from __future__ import annotations

import math
from typing import Any

from doll.amounts import clock, known, number, usd
from doll.monitor.state.market_history import MarketPoint
from doll.monitor.state.served_model import Reading, ServedModel
from doll.monitor.state.watched_job import PageState

_CURVES = ("spent_usd", "all_on_demand_usd", "spot_usd_per_h", "on_demand_usd_per_h")


def market(state: PageState) -> dict[str, Any]:
    """Return the market; empty without a provisioner, and before its first decision."""
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
    def value(name: str) -> float:
        return float(decision.get(name, math.nan))

    spot, on_demand = value("spot_usd_per_h"), value("on_demand_usd_per_h")
    saved = f", {100 * spot / on_demand:.0f} % of on-demand" if known(spot) and on_demand > 0 else ""
    running = [market for market in decision.get("running", decision["markets"]) if market]
    without_notice = report.get("preemptions_without_notice")
    return [
        ("spot, per hour", f"{usd(spot)} USD{saved}" if known(spot) else ""),
        ("on-demand, per hour", f"{usd(on_demand)} USD" if known(on_demand) else ""),
        ("availability", f"{100 * value('availability'):.0f} % of the time" if known(value("availability")) else ""),
        (
            "workers",
            f"{running.count('spot')} spot, {running.count('on_demand')} on-demand, of {len(decision['markets'])}",
        ),
        ("interruptions", f"{value('interruptions_total'):,.0f}" if known(value("interruptions_total")) else ""),
        ("without notice", "" if without_notice is None else f"{without_notice} of {report['preemptions']}"),
        ("moves", f"{value('moves_total'):,.0f}" if known(value("moves_total")) else ""),
        ("predicted", f"{usd(report['cost_predicted_usd'])} USD" if "cost_predicted_usd" in report else ""),
    ]


def _curve(points: dict[int, MarketPoint], name: str) -> dict[str, list[float]]:
    """Return the points by their numbers, without repeated values, because a price stays the same for hours."""
    curve: dict[str, list[float]] = {}
    rows = [(key, point.at_s, getattr(point, name)) for key, point in points.items()]
    for at, (key, at_s, value) in enumerate(rows):
        is_edge = at in (0, len(rows) - 1) or not value == rows[at - 1][2] == rows[at + 1][2]
        if known(value) and is_edge:
            curve[str(key)] = [round(at_s, 1), float(f"{value:.5g}")]
    return curve


def served(model: ServedModel | None) -> dict[str, Any]:
    """Return the model server; empty if none is watched."""
    if model is None:
        return {}
    facts = [] if model.newest is None else _served_facts(model, model.newest)
    curves: dict[str, dict[str, list[float]]] = {"median_ms": {}, "p99_ms": {}, "per_s": {}}
    for key, interval in model.intervals.items():
        at_s = round(interval.at_s, 1)
        curves["per_s"][str(key)] = [at_s, float(f"{interval.per_s:.4g}")]
        if known(interval.median_s):
            curves["median_ms"][str(key)] = [at_s, float(f"{1000 * interval.median_s:.4g}")]
            curves["p99_ms"][str(key)] = [at_s, float(f"{1000 * interval.p99_s:.4g}")]
    return {"facts": [list(fact) for fact in facts if fact[1]], "curves": curves, "problem": model.problem}


def _served_facts(model: ServedModel, now: Reading) -> list[tuple[str, str]]:
    versions = sorted(set(now.versions))
    refused = {code: count for code, count in now.requests.items() if not code.startswith("2") and count}
    last = model.last
    return [
        ("version" + "s" * (len(versions) > 1), ", ".join(map(str, versions))),
        ("made", f"{clock(now.age_s)} ago" if known(now.age_s) else ""),
        ("behind", f"{round(now.samples_behind):,} samples of a newer version" if now.samples_behind else ""),
        ("stale", "a newer version may not have been seen" if now.is_stale else ""),
        ("swaps", f"{round(now.swaps):,}"),
        ("requests", f"{round(now.total):,}"),
        ("latency", "" if last is None else f"median {_ms(last.median_s)}, 99 % below {_ms(last.p99_s)}"),
        ("refused", ", ".join(f"{round(count):,} with {code}" for code, count in refused.items())),
        ("waiting", f"{round(now.waiting):,}" if now.waiting else ""),
        ("not logged", f"{round(now.unlogged):,} answers" if now.unlogged else ""),
    ]


def _ms(seconds: float) -> str:
    return f"{number(1000 * seconds)} ms"
