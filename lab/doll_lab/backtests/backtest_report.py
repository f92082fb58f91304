"""The results of a backtest: a table, a verdict on the planner, JSON, CSV and a plot."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path

import numpy as np

from doll_lab.backtests.adaptive import ADAPTIVE
from doll_lab.backtests.backtest import BacktestSettings, Row

_UNIFORM = "uniform-progress"
_POINTS_OVER_BEST = 5.0
_SHARE_OF_MOVES = 1 / 3
_ALL = 100.0 - 1e-9


@dataclass(frozen=True)
class Verdict:
    """The comparison of the planner with its criteria.

    Attributes:
        all_met: whether every deadline of every trace set was met.
        worst_points: largest difference to the best baseline that met every deadline on the same set and deadline, in
            percent points of the on-demand cost.
        mean_points: mean of this difference over all sets and deadlines; negative: cheaper than the best baseline.
        points_by_set: mean of this difference over the deadlines of each trace set.
        moves_share: moves of the planner divided by the moves of Uniform Progress, over all sets and deadlines.
        moves_share_by_set: the same per trace set; NaN if Uniform Progress never moves.
    """

    all_met: bool
    worst_points: float
    worst_at: str
    mean_points: float
    points_by_set: dict[str, float]
    moves_share: float
    moves_share_by_set: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether all deadlines were met with few moves, near the cost of the best baseline on every trace set."""
        near = max(self.points_by_set.values()) <= _POINTS_OVER_BEST
        return self.all_met and near and self.moves_share < _SHARE_OF_MOVES

    @property
    def text(self) -> str:
        over = [name for name, share in self.moves_share_by_set.items() if share >= _SHARE_OF_MOVES]
        lines = [
            f"adaptive: {'met every deadline' if self.all_met else 'MISSED deadlines'}; cost {self.mean_points:+.1f} "
            f"points against the best baseline that met all, at worst {self.worst_points:+.1f} ({self.worst_at}); "
            f"{100 * self.moves_share:.0f} % of Uniform Progress's moves",
        ]
        if over:
            lines.append(f"more than a third of Uniform Progress's moves on: {', '.join(over)}")
        return "\n".join(lines)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Compare the planner with its guard with the baselines."""
    cells: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.trace_set, row.deadline_ratio), {})[row.policy] = row
    points: dict[str, float] = {}
    by_set: dict[str, list[float]] = {}
    moves: dict[str, list[float]] = {}
    for (name, ratio), cell in cells.items():
        ours, uniform = cell[ADAPTIVE], cell[_UNIFORM]
        baselines = [row for row in cell.values() if not row.policy.startswith(ADAPTIVE) and row.met_percent >= _ALL]
        over = ours.cost_percent - min(row.cost_percent for row in baselines)
        points[f"{name} x {ratio:g}"] = over
        by_set.setdefault(name, []).append(over)
        total = moves.setdefault(name, [0.0, 0.0])
        total[0] += ours.moves_per_job
        total[1] += uniform.moves_per_job
    worst_at = max(points, key=lambda at: points[at])
    return Verdict(
        all_met=all(row.met_percent >= _ALL for row in rows if row.policy == ADAPTIVE),
        worst_points=points[worst_at],
        worst_at=worst_at,
        mean_points=float(np.mean(list(points.values()))),
        points_by_set={name: float(np.mean(some)) for name, some in by_set.items()},
        moves_share=_share(sum(ours for ours, _ in moves.values()), sum(uniform for _, uniform in moves.values())),
        moves_share_by_set={name: _share(*pair) for name, pair in moves.items()},
    )


def _share(ours: float, uniform: float) -> float:
    if uniform > 0:
        return ours / uniform
    return 0.0 if ours == 0 else math.inf


def table(rows: Sequence[Row]) -> str:
    """Return the results as text: one block per trace set and deadline, one line per policy."""
    width = max(len(row.policy) for row in rows)

    def block(title: str, some: Iterable[Row]) -> str:
        lines = [title, f"  {'policy':{width}}  met %  cost %  moves/job  x oracle"]
        lines += (
            f"  {row.policy:{width}}  {row.met_percent:5.0f}  {row.cost_percent:6.1f}  {row.moves_per_job:9.1f}  "
            f"{row.over_bound:8.3f}"
            for row in some
        )
        return "\n".join(lines)

    blocks = [
        block(f"{name}, deadline {ratio:g} x, {jobs} jobs", some)
        for (name, ratio, jobs), some in groupby(rows, lambda row: (row.trace_set, row.deadline_ratio, row.jobs))
    ]
    return "\n\n".join([*blocks, block("all trace sets and deadlines", overall(rows))])


def gaps_text(rows: Sequence[Row]) -> str:
    """Return the planner's gap to the optimum, and those of its rivals, as text."""
    gaps = {
        f"{row.trace_set} x {row.deadline_ratio:g}": 100 * (row.over_bound - 1)
        for row in rows
        if row.policy == ADAPTIVE
    }
    met = all(row.met_percent >= _ALL for row in rows if row.policy == ADAPTIVE)
    worst = max(gaps, key=lambda at: gaps[at])
    others = ", ".join(
        f"{row.policy} {100 * (row.over_bound - 1):.1f} %" + ("" if row.met_percent >= _ALL else " (late)")
        for row in overall(rows) if row.policy != ADAPTIVE
    )  # fmt: skip
    return (
        f"adaptive: {'met every deadline' if met else 'MISSED deadlines'}; {np.mean(list(gaps.values())):.1f} % above "
        f"the optimum, at worst {gaps[worst]:.1f} % ({worst})\nothers: {others}"
    )


def text(rows: Sequence[Row]) -> str:
    """Return the table and the verdict as text."""
    return f"{table(rows)}\n\n{verdict(rows).text}"


def write_report(rows: Sequence[Row], report: Mapping[str, object], folder: Path) -> None:
    """Write backtest.json (`report`), backtest.csv and backtest.png into `folder`, which is created.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "backtest.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_csv(rows, folder / "backtest.csv")
    draw(rows, folder / "backtest.png")


def overall(rows: Sequence[Row]) -> list[Row]:
    """Return one row per policy: means over trace sets and deadlines."""

    def mean_of(policy: str, own: Sequence[Row]) -> Row:
        means = {
            name: float(np.mean([getattr(row, name) for row in own]))
            for name in ("met_percent", "cost_percent", "moves_per_job", "over_bound")
        }
        jobs = sum(row.jobs for row in own)
        return Row(trace_set="all", deadline_ratio=math.nan, policy=policy, jobs=jobs, **means)

    return [
        mean_of(policy, [row for row in rows if row.policy == policy])
        for policy in dict.fromkeys(row.policy for row in rows)
    ]


def to_json(rows: Sequence[Row], settings: BacktestSettings) -> dict[str, object]:
    """Return settings, one object per trace set, deadline and policy, means, and the verdict."""
    judged = verdict(rows)
    return {
        "settings": {**asdict(settings), "rates_per_s": list(settings.rates_per_s)},
        "rows": [asdict(row) for row in rows],
        "overall": [{**asdict(row), "deadline_ratio": None} for row in overall(rows)],
        "verdict": {**asdict(judged), "ok": judged.ok},
    }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write one line per trace set, deadline and policy."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw cost and moves of every policy per trace set; a hollow marker is a missed deadline."""
    from doll_lab.figures import new_figure

    ratios = sorted({row.deadline_ratio for row in rows})
    sets = list(dict.fromkeys(row.trace_set for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows))
    figure = new_figure(5.0 * len(ratios), 2.4 + 0.75 * len(sets))
    figure.suptitle("Cost of meeting deadlines on recorded spot markets (hollow: deadlines missed)", fontsize=12)
    grid = figure.subplots(2, len(ratios), squeeze=False, sharey=True)
    for column, ratio in enumerate(ratios):
        for index, policy in enumerate(policies):
            own = [row for row in rows if row.policy == policy and row.deadline_ratio == ratio]
            heights = [sets.index(row.trace_set) + 0.06 * (index - len(policies) / 2) for row in own]
            faces = [f"C{index}" if row.met_percent >= _ALL else "none" for row in own]
            for axes, values in (
                (grid[0][column], [row.cost_percent for row in own]),
                (grid[1][column], [row.moves_per_job for row in own]),
            ):
                axes.scatter(values, heights, s=26, facecolors=faces, edgecolors=f"C{index}", label=policy)
        grid[0][column].set_title(f"deadline {ratio:g} x", fontsize=10)
        grid[0][column].set_xlabel("cost, % of all on-demand", fontsize=9)
        grid[1][column].set_xlabel("moves per job", fontsize=9)
        grid[1][column].set_xscale("symlog", linthresh=1)
        for axes in grid[:, column]:
            axes.set_yticks(range(len(sets)), sets, fontsize=8)
            axes.grid(alpha=0.25)
            axes.tick_params(labelsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)
