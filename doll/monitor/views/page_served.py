"""The model server on the page: the versions that answer, and how long answers take. Pure."""

from __future__ import annotations

from typing import Any

from doll.monitor.state.formats import clock, known, number, of
from doll.monitor.state.served_model import Reading, ServedModel


def served(model: ServedModel | None) -> dict[str, Any]:
    """Empty where no model server is watched."""
    if model is None:
        return {}
    facts = [] if model.newest is None else _facts(model, model.newest)
    curves: dict[str, dict[str, list[float]]] = {"median_ms": {}, "p99_ms": {}, "per_s": {}}
    for key, interval in model.intervals.items():
        at_s = round(interval.at_s, 1)
        curves["per_s"][str(key)] = [at_s, float(f"{interval.per_s:.4g}")]
        if known(interval.median_s):
            curves["median_ms"][str(key)] = [at_s, float(f"{1000 * interval.median_s:.4g}")]
            curves["p99_ms"][str(key)] = [at_s, float(f"{1000 * interval.p99_s:.4g}")]
    return {"facts": [list(fact) for fact in facts if fact[1]], "curves": curves, "problem": model.problem}


def _facts(model: ServedModel, now: Reading) -> list[tuple[str, str]]:
    versions = sorted(set(now.versions))
    refused = {code: count for code, count in now.requests.items() if not code.startswith("2") and count}
    last = model.last
    return [
        ("version" + "s" * (len(versions) > 1), ", ".join(map(str, versions))),
        ("made", f"{clock(now.age_s)} ago" if known(now.age_s) else ""),
        ("behind", f"{of(round(now.samples_behind), None)} samples of a newer version" if now.samples_behind else ""),
        ("stale", "a newer version may not have been seen" if now.is_stale else ""),
        ("swaps", of(round(now.swaps), None)),
        ("requests", of(round(now.total), None)),
        ("latency", "" if last is None else f"median {_ms(last.median_s)}, 99 % below {_ms(last.p99_s)}"),
        ("refused", ", ".join(f"{of(round(count), None)} with {code}" for code, count in refused.items())),
        ("waiting", of(round(now.waiting), None) if now.waiting else ""),
        ("not logged", f"{of(round(now.unlogged), None)} answers" if now.unlogged else ""),
    ]


def _ms(seconds: float) -> str:
    return f"{number(1000 * seconds)} ms"
