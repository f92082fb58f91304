"""Cost against moves: the planner at several reserves of slack, and the baselines, on every trace set of a folder.

    python -m benchmarks.frontier ../shared/data [--only NAME ...] [--seed N] [--out FOLDER]

A point per (`slack_reserve`, `return_reserve`), the default marked. Per set, over its deadlines: moves over those of
Uniform Progress, percent points of cost over the cheapest baseline that met every deadline. `least` is the number of
moves that a policy which knows the future needs if it begins all on spot: each slot that moves at least once gains at
most the time for which it has no spot machine.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from doll.provisioner.traces.model import TraceSet
from doll.provisioner.traces.recordings import load
from rich.console import Console
from rich.progress import Progress

from doll_lab.backtests.adaptive import LIVE, Adaptive
from doll_lab.backtests.backtest import BacktestSettings, Row, backtest, cells, windows_of
from doll_lab.backtests.baselines import MarketPolicy, baselines
from doll_lab.figures import decorate

RESERVES = ((1.0, 1.0), (0.75, 0.75), (0.5, 0.7), (0.4, 0.7), (0.3, 0.6), (0.2, 0.5), (0.0, 0.2))
_ALL = 100.0 - 1e-9


def planner_name(reserves: tuple[float, float]) -> str:
    return f"adaptive {reserves[0]:g}/{reserves[1]:g}"


def policies() -> list[MarketPolicy]:
    planners = [
        Adaptive(planner_name(pair), replace(LIVE, slack_reserve=pair[0], return_reserve=pair[1])) for pair in RESERVES
    ]
    return [*baselines(), *planners]


def least_moves(trace_set: TraceSet, ratio: float, settings: BacktestSettings) -> float:
    """Mean over the jobs: the fewest slots whose down time, added to all the up time, does the work in time."""
    windows, on_demand_s = windows_of(trace_set, settings)
    ticks = int(ratio * on_demand_s / settings.tick_s)
    up_s = windows.up[:, :ticks].sum(axis=1) * settings.tick_s
    down_s = -np.sort(-(ticks * settings.tick_s - up_s), axis=1)
    done_s = up_s.sum(axis=1)[:, None] + np.concatenate((np.zeros((len(up_s), 1)), np.cumsum(down_s, axis=1)), axis=1)
    # Equal streams, so that work is counted in seconds of one slot.
    return float(np.mean((done_s < len(settings.rates_per_s) * on_demand_s * (1 - 1e-9)).sum(axis=1)))


def points(rows: Sequence[Row], sets: Sequence[TraceSet], settings: BacktestSettings) -> list[dict[str, float | str]]:
    """One line per set and policy, over the set's deadlines."""
    lines: list[dict[str, float | str]] = []
    for trace_set in sets:
        own = [row for row in rows if row.trace_set == trace_set.name]
        uniform = sum(row.moves_per_job for row in own if row.policy == "uniform-progress")
        best = {
            ratio: min(
                row.cost_percent
                for row in own
                if row.deadline_ratio == ratio and row.met_percent >= _ALL and not row.policy.startswith("adaptive")
            )
            for ratio in settings.deadline_ratios
        }
        least = sum(least_moves(trace_set, ratio, settings) for ratio in settings.deadline_ratios)
        for policy in dict.fromkeys(row.policy for row in own):
            mine = [row for row in own if row.policy == policy]
            moves = sum(row.moves_per_job for row in mine)
            over = [row.cost_percent - best[row.deadline_ratio] for row in mine]
            lines.append({
                "trace_set": trace_set.name, "policy": policy, "met_percent": min(row.met_percent for row in mine),
                "points_over_best": float(np.mean(over)), "worst_points": max(over), "moves_per_job": moves,
                "moves_share": moves / uniform if uniform else math.nan, "least_moves": least,
            })  # fmt: skip
    return lines


def draw(lines: Sequence[dict[str, float | str]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in dict.fromkeys(str(line["trace_set"]) for line in lines)
             if any(line["trace_set"] == name and line["policy"] == "greedy" and float(line["moves_per_job"]) > 0
                    for line in lines)]  # fmt: skip
    columns = 4
    figure = Figure(figsize=(12.0, 2.7 * -(-len(names) // columns)), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-len(names) // columns), columns, squeeze=False).ravel()
    default = planner_name((LIVE.slack_reserve, LIVE.return_reserve))
    for axes, name in zip(grid, names, strict=False):
        own = {str(line["policy"]): line for line in lines if line["trace_set"] == name}
        curve = [own[planner_name(pair)] for pair in RESERVES]
        axes.plot([line["moves_share"] for line in curve], [line["points_over_best"] for line in curve], "o-", ms=3,
                  color="#4c78a8", label="planner")  # fmt: skip
        axes.plot(own[default]["moves_share"], own[default]["points_over_best"], "o", ms=8, mfc="none", color="#333333",
                  label="its default")  # fmt: skip
        for policy, marker in (("greedy", "v"), ("uniform-progress", "s")):
            axes.plot(
                own[policy]["moves_share"], own[policy]["points_over_best"], marker, color="#b279a2", label=policy
            )
        uniform = float(own["uniform-progress"]["moves_per_job"])
        axes.axvline(float(own["greedy"]["least_moves"]) / uniform, color="#999999", linestyle=":", label="least")
        axes.axvspan(-0.05, 1 / 3, ymax=1.0, color="#54a24b", alpha=0.08)
        axes.axhline(5.0, color="#54a24b", linewidth=0.8)
        decorate(axes, name, "moves / Uniform Progress's", "points over best baseline")
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    grid[0].legend(fontsize=7, frameon=False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="recorded markets, as for `doll backtest`")
    parser.add_argument("--only", nargs="+", help="only trace sets whose name contains one of these")
    parser.add_argument("--windows", type=int, default=12, help="jobs per trace set and deadline [default: 12]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder of frontier.csv, .png"
    )
    options = parser.parse_args(arguments)
    sets = [trace_set for trace_set in load(options.folder)
            if options.only is None or any(part in trace_set.name for part in options.only)]  # fmt: skip
    settings = BacktestSettings(seed=options.seed, windows=options.windows)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=len(cells(sets, settings)))
        rows = backtest(sets, settings, policies, processes=options.processes, progress=lambda _: bar.advance(task))
    lines = points(rows, sets, settings)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "frontier.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    draw(lines, options.out / "frontier.png")
    print(f"{'trace set':34} {'policy':26} met %  points  worst  moves  share  least")
    for line in lines:
        columns = (
            f"{line['trace_set']:34} {line['policy']:26} {line['met_percent']:5.0f}  {line['points_over_best']:+6.1f} "
        )
        columns += f"{line['worst_points']:+6.1f} {line['moves_per_job']:6.1f} {line['moves_share']:6.2f} "
        print(f"{columns}{line['least_moves']:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
