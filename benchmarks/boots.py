"""The planner away from its defaults: points above the best rival for short to long boots, tight to loose deadlines.

    python -m benchmarks.boots ../shared/data [--boot 600 ...] [--deadline-ratio 1.05 ...] [--seed N] [--out FOLDER]

A cell is a trace set, a boot time and a deadline. Its best rival is the cheapest one that met every deadline of the
cell; points are percent points of the cost of all on demand. `held` is the share of the fleet that the guard lets run
on spot at the start of the job: slack over an outage of all of spot and a boot. Below 1, whoever is cheaper bets on
that outage not to come.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from doll.provisioner.planning.baselines import MarketPolicy, baselines
from doll.provisioner.traces.model import TraceSet
from doll.provisioner.traces.recordings import load
from doll.simulation.adaptive import ADAPTIVE, LIVE, planners
from doll.simulation.backtest import BacktestSettings, Row, windows_of
from doll.simulation.parallel import backtest_on

BOOTS_S = (30.0, 60.0, 120.0, 300.0, 600.0, 900.0)
RATIOS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
_ALL = 100.0 - 1e-9


def policies() -> list[MarketPolicy]:
    return [*baselines(), planners()[0]]


def lines(rows: Sequence[Row], sets: Sequence[TraceSet], settings: BacktestSettings) -> list[dict[str, float | str]]:
    """One line per trace set and deadline."""
    found: list[dict[str, float | str]] = []
    for trace_set in sets:
        _, on_demand_s = windows_of(trace_set, settings)
        for ratio in settings.deadline_ratios:
            cell = {row.policy: row for row in rows
                    if row.trace_set == trace_set.name and row.deadline_ratio == ratio}  # fmt: skip
            ours = cell.pop(ADAPTIVE)
            best = min((row for row in cell.values() if row.met_percent >= _ALL), key=lambda row: row.cost_percent)
            slack_s = on_demand_s * (ratio * (1 - LIVE.margin) - 1)
            found.append({
                "trace_set": trace_set.name, "boot_s": settings.boot_s, "deadline_ratio": ratio, "jobs": ours.jobs,
                "met_percent": ours.met_percent, "cost_percent": ours.cost_percent, "best_rival": best.policy,
                "best_percent": best.cost_percent, "points": ours.cost_percent - best.cost_percent,
                "moves_per_job": ours.moves_per_job, "uniform_moves": cell["uniform-progress"].moves_per_job,
                "held": min(1.0, max(0.0, slack_s) / (min(settings.tick_s, LIVE.replan_s) + settings.boot_s)),
            })  # fmt: skip
    return found


def table(found: Sequence[dict[str, float | str]]) -> str:
    """Mean and worst points over the trace sets, a row per boot and a column per deadline, and the cells above 5."""
    boots = sorted({float(line["boot_s"]) for line in found})
    ratios = sorted({float(line["deadline_ratio"]) for line in found})
    text = ["boot s  " + "".join(f"{f'x {ratio:g}':>15}" for ratio in ratios)]
    for boot_s in boots:
        text.append(f"{boot_s:6.0f}  ")
        for ratio in ratios:
            points = [float(line["points"]) for line in found
                      if line["boot_s"] == boot_s and line["deadline_ratio"] == ratio]  # fmt: skip
            text[-1] += f"{f'{sum(points) / len(points):+.1f}, {max(points):+.1f}':>15}"
    points = [float(line["points"]) for line in found]
    missed = sum(float(line["met_percent"]) < _ALL for line in found)
    text.append(f"{len(found)} cells: mean {sum(points) / len(points):+.2f}, worst {max(points):+.1f}; "
                f"cells with a missed deadline: {missed}")  # fmt: skip
    for line in sorted(found, key=lambda line: -float(line["points"])):
        if float(line["points"]) > 5.0:
            text.append(f"  {line['points']:+.1f}: {line['trace_set']}, boot {line['boot_s']:g} s, deadline "
                        f"{line['deadline_ratio']:g} x, {line['best_rival']}; held {line['held']:.2f}")  # fmt: skip
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="recorded markets, as for `doll backtest`")
    parser.add_argument("--boot", type=float, nargs="+", default=BOOTS_S, help="seconds")
    parser.add_argument("--deadline-ratio", type=float, nargs="+", default=RATIOS, help="deadline over θ_0")
    parser.add_argument("--only", nargs="+", help="only trace sets whose name contains one of these")
    parser.add_argument("--windows", type=int, default=12, help="jobs per cell [default: 12]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of boots.csv")
    options = parser.parse_args(arguments)
    sets = [found for found in load(options.folder)
            if options.only is None or any(part in found.name for part in options.only)]  # fmt: skip
    found: list[dict[str, float | str]] = []
    for boot_s in options.boot:
        settings = BacktestSettings(
            deadline_ratios=tuple(options.deadline_ratio), windows=options.windows, boot_s=boot_s, seed=options.seed
        )
        found += lines(backtest_on(options.processes, sets, settings, policies), sets, settings)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "boots.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
