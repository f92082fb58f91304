"""MLLess's tuner live, on and off: `doll spot` of PMF on MovieLens 1M under `isp`, on machines that are billed by time.

All machines stay up, so that the bill differs by scale-in alone. They share this machine's cores, so a round of fewer
workers takes less time: this stands for the exchange that grows with the number of workers in MLLess.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from doll.config import load

from benchmarks.live import mlless_filter, mlless_ratings
from benchmarks.live.experiment import JOBS, Claim, Options, Report, mean_sd, up
from benchmarks.tables import Table

NAME: Final = "mlless_scale_in"
PAPER: Final = "MLLess, sections 4.3 and 6.4"
SETTINGS: Final = {
    "workers": "6",
    "batch_size": "4096",  # ratings
    "lr": "40",  # of a worker's mean gradient
    "rate_per_s": "40000",  # ratings of each worker's stream
    "every_s": "5",  # between two decisions of the tuner; MLLess's T is 20 in jobs ten times as long
}
SEEDS: Final = (0, 1, 2)
JOB: Final = JOBS / "ratings" / "job.yaml"
_PRICES: Final = "spot_usd_per_h: 0.158, on_demand_usd_per_h: 0.286"  # of c7g.xlarge, early 2026
_MAX_UPDATES: Final = 600  # the loss is reached before


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        time_s: from the first launch to the loss; `cost_usd` is the bill until then.
        num_released: workers that have left.
        missing, twice: offsets, by the audit.
        criteria: by what each worker that left was chosen (docs/decisions/0121).
    """

    is_on: bool
    seed: int
    is_reached: bool
    time_s: float
    cost_usd: float
    updates: int
    loss: float
    num_released: int
    missing: int
    twice: int
    criteria: tuple[str, ...] = ()

    @classmethod
    def of(cls, is_on: bool, seed: int, goal: float, folder: Path, report: dict[str, Any]) -> Row:
        """Of a run's report.json and the journal of its controller."""
        (journal,) = folder.glob("provision-*.jsonl")
        entries = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
        kinds = [entry["kind"] for entry in entries]
        audit, loss = report["audit"], float(report["best_loss"])
        return cls(
            is_on, seed, loss <= goal, report["finish_s"], report["cost_usd"], report["updates"], loss,
            kinds.count("release") - kinds.count("recall"), audit["missing"], audit["duplicate"],
            tuple(entry["by"] for entry in entries if entry["kind"] == "release"),
        )  # fmt: skip

    @property
    def perf_per_usd(self) -> float:
        """MLLess's Perf/$: 1 / (time x cost)."""
        return 1 / (self.time_s * self.cost_usd)


def run(folder: Path, options: Options) -> Report:
    job, asked = load(JOB), options.settings
    goal = job.stop.loss
    assert goal is not None, "the example has a loss to reach"
    given = replace(options, quick=False, settings={**mlless_ratings.SETTINGS, **asked, "samples": ""})
    shared = mlless_filter.changes_of(mlless_ratings.LEARNED, given, "dense")
    changes = [
        *shared, f"data.workers={asked['workers']}",
        "training.policy={name: isp, contributions: sum, significance: 0.7}",
        f"stop={{loss: {goal}, updates: {20 if options.quick else _MAX_UPDATES}}}",
        f"plan={{deadline_s: 600, boot_s: 1, alpha: 0.999, cycle_s: 36000, {_PRICES}}}", "fleet={kind: processes}",
    ]  # fmt: skip
    rows = []
    for seed in options.seeds:
        for is_on in (False, True):
            tuner = f"{{enabled: {is_on}, every_s: {asked['every_s']}, horizon_s: {asked['every_s']}, min_workers: 2}}"
            parent = folder / f"{'on' if is_on else 'off'}-{seed}"
            report = up(
                JOB, parent, [*changes, f"provision={{every_s: 1, scale_in: {tuner}}}", f"seed={seed}"],
                command="spot",
            )  # fmt: skip
            rows.append(Row.of(is_on, seed, goal, max(parent.iterdir()), report))
            print(table(rows).text(), flush=True)
    return Report(
        "MLLess: scale-in on PMF, on and off",
        [table(rows)],
        options.seeds,
        f"± is the standard deviation of {len(options.seeds)} runs" if len(options.seeds) > 1 else "one run each",
        claims=claims(rows),
        notes=[
            f"{asked['workers']} workers at first, batches of {asked['batch_size']} ratings, isp with v = 0.7, a "
            f"decision every {asked['every_s']} s; runs of both kinds alternate. The others take over "
            "the stream of a worker that leaves. Chosen by: what distinguished the worker from the others.",
        ],
        data={"rows": [asdict(row) for row in rows]},
    )


def table(rows: Sequence[Row]) -> Table:
    """A line for each kind, means over its runs."""
    columns = ("scale-in", "reached", "workers left", "time, s", "cost, USD", "updates", "best loss", "Perf/$")
    left = (columns[0], "chosen by")
    result = Table("`doll spot` to the held-out loss of the job", (*columns, "missing", "twice", left[1]), left=left)
    for is_on in (False, True):
        mine = [row for row in rows if row.is_on == is_on]
        if mine:
            result.rows.append(
                [
                    "on" if is_on else "off", f"{sum(row.is_reached for row in mine)} of {len(mine)}",
                    mean_sd([row.num_released for row in mine], 1), mean_sd([row.time_s for row in mine], 1),
                    mean_sd([row.cost_usd for row in mine], 5), mean_sd([row.updates for row in mine], 0),
                    mean_sd([row.loss for row in mine], 4), mean_sd([row.perf_per_usd for row in mine], 2),
                    *(str(sum(getattr(row, name) for row in mine)) for name in ("missing", "twice")),
                    ", ".join(f"{name} {count}" for name, count in Counter(
                        name for row in mine for name in row.criteria).most_common()),
                ]
            )  # fmt: skip
    return result


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Runs of one seed are compared with each other."""
    off = {row.seed: row for row in rows if not row.is_on}
    gains = [row.perf_per_usd / off[row.seed].perf_per_usd for row in rows if row.is_on and row.seed in off]
    if not gains:
        return []
    good = min(gains) > 1
    why = (
        "the job ends some ten seconds after the knee: who leaves then saves little, and a sum of fewer steps needs "
        "more rounds"
    )
    return [
        Claim(
            "PMF, isp: Perf/$ with the tuner over that without, each seed", "> 1",
            ", ".join(f"{gain:.2f}" for gain in gains), "reproduced" if good else "not reproduced", "" if good else why,
        )
    ]  # fmt: skip
