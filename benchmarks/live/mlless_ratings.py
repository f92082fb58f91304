"""MLLess's filter on its own main workload, live: PMF of MovieLens 1M under `isp` with several thresholds v.

    python -m benchmarks.live.mlless_ratings [--values 0,0.3,0.7,1] [--ratings RATINGS.csv.gz]

Each v is a whole `doll up` of the example `ratings`, to its `stop.loss`. The table shows time, updates, and bytes both
ways: what workers push, and what they fetch. The network is this machine's own, without a limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from doll.config import load

JOB = Path(__file__).parents[2] / "examples" / "ratings" / "job.yaml"
VALUES = "0,0.3,0.7,1"


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


def table(rows: Sequence[Row]) -> str:
    """A line for each run; the last two columns compare with the first run."""
    lines = ["   v  reached   time s  updates  best loss  pushed MB  fetched MB  both MB  fewer bytes  more updates"]
    for row in rows:
        both, first = row.pushed_bytes + row.fetched_bytes, rows[0]
        fewer = (first.pushed_bytes + first.fetched_bytes) / max(both, 1)
        more = 100 * (row.updates / max(first.updates, 1) - 1)
        loss = "?" if row.loss is None else f"{row.loss:.4f}"
        lines.append(
            f"{row.significance:4g}  {'yes' if row.is_reached else 'no':>7}  {row.time_s:7.1f}  {row.updates:7}"
            f"  {loss:>9}  {row.pushed_bytes / 1e6:9.1f}  {row.fetched_bytes / 1e6:10.1f}  {both / 1e6:7.1f}"
            f"  {fewer:9.2f} x  {more:+10.1f} %"
        )
    return "\n".join(lines)


def run(folder: str, changes: Sequence[str]) -> dict[str, Any]:
    """One `doll up`; its report.

    Raises:
        subprocess.CalledProcessError: the run has failed.
    """
    options = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "doll", "up", str(JOB), "--json", "--parent-folder", folder, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", default=VALUES, help=f"v of each run, with commas [{VALUES}]")
    parser.add_argument("--ratings", type=Path, help="the file of MovieLens 1M [the one that the job file names]")
    parser.add_argument("--samples", type=int, help="end of a run that does not reach the loss [that of the job file]")
    asked = parser.parse_args()
    job = load(JOB)
    assert job.source.kind == "ratings", "the example has such a source"
    assert job.source.path is not None, "and names its file"
    path = job.path(job.source.path) if asked.ratings is None else asked.ratings.resolve()
    if not path.is_file():
        sys.exit(f"{path}: expected the ratings of MovieLens 1M; name another file with --ratings")
    # The steps of a round are added, and a group of `doll` takes the mean: the same step for the model.
    rate = job.training.optimizer.lr / job.data.workers
    changes = [f"training.optimizer.lr={rate!r}", f"source.path={path}", f"task.args.ratings_path={path}"]
    if asked.samples is not None:
        changes.append(f"stop.samples={asked.samples}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for word in asked.values.split(","):
            policy = f"training.policy={{name: isp, significance: {float(word)!r}}}"
            rows.append(Row.of(float(word), run(folder, [policy, *changes]), job.stop.loss))
            print(table(rows), flush=True)


if __name__ == "__main__":
    main()
