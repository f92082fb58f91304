"""`doll spot` over seeds: is the deadline met, does it cost what a backtest of the same market predicts, does it audit?

    python -m benchmarks.spot [JOB.yaml] [--seeds 5] [--first 0] [--out FILE.json]

Bars: the deadline is met in every run that the plan calls feasible; the mean cost is within 3 points of the predicted
one, in percent of on-demand (single runs are shown: noise of arrivals and boots moves a planner that decides at
thresholds); nothing is lost or counted twice. Each run takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_COST_ERROR_POINTS = 3.0
_RUN_S = 900.0
_INFEASIBLE = 3
_KEPT = (
    "deadline_met", "deadline_s", "finish_s", "finish_predicted_s", "cost_usd", "cost_until_terminated_usd",
    "all_on_demand_usd", "cost_predicted_usd", "cost_percent", "cost_predicted_percent", "cost_error_points", "moves",
    "moves_predicted", "preemptions", "preemptions_predicted", "preemptions_killed", "preemptions_without_notice",
    "instances", "accuracy", "updates", "samples", "seconds", "market", "predictions", "moves_log",
)  # fmt: skip
_COLUMNS = (
    ("seed", "{seed}"), ("deadline", "{met}"), ("end s", "{finish_s:.1f}"), ("predicted", "{finish_predicted_s:.1f}"),
    ("cost %", "{cost_percent:.1f}"), ("predicted", "{cost_predicted_percent:.1f}"),
    ("error", "{cost_error_points:+.1f}"), ("moves", "{moves}"), ("preempted", "{preemptions}"),
    ("killed", "{preemptions_killed}"),
    ("accuracy", "{accuracy:.3f}"), ("missing", "{missing}"), ("twice", "{twice}"), ("load", "{load:.0f}"),
)  # fmt: skip


def run_once(job: Path, seed: int) -> dict[str, Any]:
    """One run; what its report says.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="doll-spot-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "doll", "spot", str(job), "--seed", str(seed), "--parent-folder", folder, "--json"],
            capture_output=True, text=True, timeout=_RUN_S, check=False,
        )  # fmt: skip
    if done.returncode == _INFEASIBLE:
        return {"seed": seed, "feasible": False, "problem": json.loads(done.stdout)["problem"]}
    if not done.stdout:
        raise RuntimeError(f"doll spot ended with {done.returncode}:\n{done.stderr[-4000:]}")
    report = json.loads(done.stdout)
    audit = report["audit"] or {}
    return {
        "seed": seed, "feasible": True, "exit_code": done.returncode, **{name: report.get(name) for name in _KEPT},
        "audit": audit, "missing": audit.get("missing"), "twice": audit.get("duplicate"), "load": os.getloadavg()[1],
        "met": "met" if report["deadline_met"] else "MISSED",
    }  # fmt: skip


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The bars."""
    ran = [row for row in rows if row["feasible"]]
    off = [row["cost_error_points"] for row in ran]
    return {
        "runs": len(ran),
        "deadlines_met": sum(row["deadline_met"] for row in ran),
        "mean_cost_percent": statistics.fmean(row["cost_percent"] for row in ran),
        "mean_predicted_percent": statistics.fmean(row["cost_predicted_percent"] for row in ran),
        "mean_off_points": statistics.fmean(off),
        "most_off_points": max(off, key=abs),
        "within_3_points": sum(abs(value) <= MAX_COST_ERROR_POINTS for value in off),
        "audits_clean": sum(row["audit"].get("ok") is True for row in ran),
    }


def passed(result: dict[str, Any]) -> bool:
    return (
        result["deadlines_met"] == result["audits_clean"] == result["runs"]
        and abs(result["mean_off_points"]) <= MAX_COST_ERROR_POINTS
    )  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    cells = [[name for name, _ in _COLUMNS]]
    for row in rows:
        if row["feasible"]:
            cells.append([form.format(**row) for _, form in _COLUMNS])
        else:
            cells.append([str(row["seed"]), f"not feasible: {row['problem']}"])
    widths = [max(len(line[at]) for line in cells if len(line) == len(_COLUMNS)) for at in range(len(_COLUMNS))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=False)) for line in cells)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, nargs="?", default=Path("examples/digits/market.yaml"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/spot.json"))
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for seed in range(options.first, options.first + options.seeds):
        rows.append(run_once(options.job, seed))
        print(table(rows), flush=True)
        # After each: a run that is cut off keeps what it has.
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = verdict(rows) if any(row["feasible"] for row in rows) else {}
        options.out.write_text(json.dumps({"rows": rows, "verdict": result}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0 if result and passed(result) else 1


if __name__ == "__main__":
    sys.exit(main())
