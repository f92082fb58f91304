"""The planner with other boots and deadlines: points above the best baseline, from short to long and tight to loose.

    python -m benchmarks.boots ../shared/data [--boot 600 ...] [--deadline-ratio 1.05 ...] [--seed N] [--out FOLDER]

A cell is a trace set, a boot time and a deadline. Its best baseline is the cheapest one that met every deadline of the
cell; points are percent points of the cost of all on-demand. `spot_share` is the share of the fleet that the guard
allows on spot at the start of the job: the slack divided by the loss of an interruption of all spot instances. If it is
below 1, a cheaper policy misses the deadline in case of that interruption.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from doll.provisioner.traces.model import TraceSet
from doll.provisioner.traces.recordings import load

from doll_lab.backtests.adaptive import ADAPTIVE, LIVE, planners
from doll_lab.backtests.backtest import BacktestSettings, Row, backtest, windows_of
from doll_lab.backtests.baselines import MarketPolicy, baselines

BOOTS_S = (30.0, 60.0, 120.0, 300.0, 600.0, 900.0)
RATIOS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
_ALL = 100.0 - 1e-9


def policies() -> list[MarketPolicy]:
    return [*baselines(), planners()[0]]


def lines(rows: Sequence[Row], sets: Sequence[TraceSet], settings: BacktestSettings) -> list[dict[str, float | str]]:
    """One line per trace set and deadline."""
    table_lines: list[dict[str, float | str]] = []
    for trace_set in sets:
        _, on_demand_s = windows_of(trace_set, settings)
        for ratio in settings.deadline_ratios:
            cell = {row.policy: row for row in rows
                    if row.trace_set == trace_set.name and row.deadline_ratio == ratio}  # fmt: skip
            ours = cell.pop(ADAPTIVE)
            best = min((row for row in cell.values() if row.met_percent >= _ALL), key=lambda row: row.cost_percent)
            slack_s = on_demand_s * (ratio * (1 - LIVE.margin) - 1)
            table_lines.append({
                "trace_set": trace_set.name, "boot_s": settings.boot_s, "deadline_ratio": ratio, "jobs": ours.jobs,
                "met_percent": ours.met_percent, "cost_percent": ours.cost_percent, "best_baseline": best.policy,
                "best_percent": best.cost_percent, "points": ours.cost_percent - best.cost_percent,
                "moves_per_job": ours.moves_per_job, "uniform_moves": cell["uniform-progress"].moves_per_job,
                "spot_share": min(1.0, max(0.0, slack_s) / (min(settings.tick_s, LIVE.replan_s) + settings.boot_s)),
            })  # fmt: skip
    return table_lines


def table(cells: Sequence[dict[str, float | str]]) -> str:
    """Mean and worst points over the trace sets, a row per boot and a column per deadline, and the cells above 5."""
    boots = sorted({float(line["boot_s"]) for line in cells})
    ratios = sorted({float(line["deadline_ratio"]) for line in cells})
    text = ["boot s  " + "".join(f"{f'x {ratio:g}':>15}" for ratio in ratios)]
    for boot_s in boots:
        text.append(f"{boot_s:6.0f}  ")
        for ratio in ratios:
            points = [float(line["points"]) for line in cells
                      if line["boot_s"] == boot_s and line["deadline_ratio"] == ratio]  # fmt: skip
            text[-1] += f"{f'{sum(points) / len(points):+.1f}, {max(points):+.1f}':>15}"
    points = [float(line["points"]) for line in cells]
    missed = sum(float(line["met_percent"]) < _ALL for line in cells)
    text.append(f"{len(cells)} cells: mean {sum(points) / len(points):+.2f}, worst {max(points):+.1f}; "
                f"cells with a missed deadline: {missed}")  # fmt: skip
    for line in sorted(cells, key=lambda line: -float(line["points"])):
        if float(line["points"]) > 5.0:
            text.append(f"  {line['points']:+.1f}: {line['trace_set']}, boot {line['boot_s']:g} s, deadline "
                        f"{line['deadline_ratio']:g} x, {line['best_baseline']}; spot "
                        f"{line['spot_share']:.2f}")  # fmt: skip
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
    sets = [trace_set for trace_set in load(options.folder)
            if options.only is None or any(part in trace_set.name for part in options.only)]  # fmt: skip
    cells: list[dict[str, float | str]] = []
    for boot_s in options.boot:
        settings = BacktestSettings(
            deadline_ratios=tuple(options.deadline_ratio), windows=options.windows, boot_s=boot_s, seed=options.seed
        )
        cells += lines(backtest(sets, settings, policies, processes=options.processes), sets, settings)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "boots.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
