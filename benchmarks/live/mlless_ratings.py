"""MLLess's filter on its own main workload: PMF of MovieLens 1M under `isp` with several thresholds v.

Each v is a whole `doll up` of the example `ratings`, to its `stop.loss`. The table shows time, updates, and bytes both
ways: what workers push, and what they fetch. The network is this machine's own, without a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from doll.config import load

from benchmarks.live.experiment import JOBS, Options, Report, mean_sd, up
from benchmarks.tables import Table

NAME: Final = "mlless_ratings"
PAPER: Final = "MLLess, sections 4.2 and 6.3"
# Thresholds v; ratings in a batch, about MLLess's 6 K and a whole number of records; learning rate of a worker's mean
# gradient (at twice that the factors diverge); whether the factors are tables; seconds between two checkpoints, each of
# which makes workers send what they hold back; end of a run that does not reach the loss.
SETTINGS: Final = {
    "values": "0,0.3,0.7,1",
    "batch_size": "6272",
    "lr": "60",
    "tables": "no",
    "checkpoint_s": "20",
    "samples": "",
}
JOB: Final = JOBS / "ratings" / "job.yaml"


class Row(NamedTuple):
    """One run."""

    significance: float
    is_reached: bool  # the held-out loss of the job's stop rule
    time_s: float
    updates: int
    loss: float | None  # held out, the best
    pushed_bytes: int
    fetched_bytes: int

    @classmethod
    def of(cls, significance: float, report: dict[str, Any], loss: float | None) -> Row:
        """Of a run's report.json, where `loss` is to be reached."""
        sent, best = report["measures"]["bytes"], report["best_loss"]
        is_reached = loss is not None and best is not None and best <= loss
        time_s, updates = report["training_seconds"], report["updates"]
        return cls(significance, is_reached, time_s, updates, best, sent["pushed"], sent["fetched"])

    @property
    def both_bytes(self) -> int:
        return self.pushed_bytes + self.fetched_bytes


def table(rows: Sequence[Row]) -> Table:
    """A line for each v, means over its runs; the last two columns compare with the first v."""
    columns = ("v", "reached", "time, s", "updates", "best loss", "pushed MB", "fetched MB", "both MB")
    result = Table("To the held-out loss of the job", (*columns, "fewer bytes", "more updates"))
    values = list(dict.fromkeys(row.significance for row in rows))
    first = [row for row in rows if row.significance == values[0]]
    for value in values:
        mine = [row for row in rows if row.significance == value]
        # Each run beside that of the same seed; a value whose last seeds are still to come has fewer.
        pairs = list(zip(first, mine, strict=False))
        losses = [row.loss for row in mine if row.loss is not None]
        result.rows.append(
            [
                f"{value:g}", f"{sum(row.is_reached for row in mine)} of {len(mine)}",
                mean_sd([row.time_s for row in mine], 1), mean_sd([row.updates for row in mine], 0),
                mean_sd(losses, 4) if losses else "?",
                *(mean_sd([getattr(row, f"{name}_bytes") / 1e6 for row in mine], 1)
                  for name in ("pushed", "fetched", "both")),
                mean_sd([zero.both_bytes / max(row.both_bytes, 1) for zero, row in pairs], 2) + " x",
                mean_sd([100 * (row.updates / max(zero.updates, 1) - 1) for zero, row in pairs], 1) + " %",
            ]
        )  # fmt: skip
    return result


def run(folder: Path, options: Options) -> Report:
    ratings = options.file("movielens_1m/ratings.csv.gz", "the ratings of MovieLens 1M (user,item,rating,timestamp)")
    job = load(JOB)
    asked = options.settings
    form = "sparse (tables)" if asked["tables"] == "yes" else "dense"
    changes = [
        f"source.path={ratings}", f"task.args.ratings_path={ratings}", f"training.optimizer.lr={asked['lr']}",
        f"data.batch_size={asked['batch_size']}", f"task.args.sparse={asked['tables'] == 'yes'}",
        "arrivals.rate_per_s=40000", f"checkpoint.every_s={asked['checkpoint_s']}", "checkpoint.every_updates=1000000",
        "evaluation.every_s=0.2",
    ]  # fmt: skip
    if samples := "100000" if options.quick else asked["samples"]:
        changes.append(f"stop.samples={samples}")
    rows = []
    for seed in options.seeds:
        for value in [float(word) for word in asked["values"].split(",")]:
            policy = f"training.policy={{name: isp, significance: {value!r}}}"
            rows.append(Row.of(value, up(JOB, folder, [policy, f"seed={seed}", *changes]), job.stop.loss))
            print(table(rows).text(), flush=True)
    count = len(options.seeds)
    spread = (
        "one run each, so the spread is not known" if count == 1 else f"± is the standard deviation of {count} runs"
    )
    return Report(
        "MLLess: the significance filter on MovieLens 1M",
        [table(rows)],
        options.seeds,
        spread,
        notes=[
            f"{job.data.workers} workers, batches of {asked['batch_size']} ratings, {form} factors, "
            f"a checkpoint every {asked['checkpoint_s']} s. The network is this machine's own, without a limit."
        ],
        data={"rows": [row._asdict() for row in rows]},
    )
