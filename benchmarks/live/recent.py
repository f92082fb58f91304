"""Groups of recent versions on real jobs: one worker takes four times as long, or none does.

Each run is a whole `doll up` of the digits, to a number of samples (fewer without a slow worker); the batches of each
worker take a stated time, whatever the machine. Runs with exact and with recent versions alternate. The held-out
accuracy is the mean over the last third of the updates, and the audit of each run counts each sample once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from doll.config import load
from doll.monitor.state.csv_file import read_rows
from doll.run.local.up import run_up

from benchmarks.live.experiment import JOBS, Claim, Options, Report, mean_sd
from benchmarks.live.paced import OneSlowWorker
from benchmarks.tables import Table

NAME = "recent"
PAPER = "K-batch-async SGD (Dutta et al., arXiv 1803.01113), FedBuff (2106.06639), GBA (2205.11048)"
SETTINGS = {
    "samples": "24000",
    "even_samples": "8000",
    "batch_s": "0.15",
    "slowness": "4",
    "group_size": "4",
    "staleness": "3",
}
SEEDS = (0, 1, 2)
EXACT: Final = 0  # staleness


@dataclass(frozen=True)
class Run:
    """One run. `staleness`: of the policy. `seconds`: of learning."""

    slowness: float
    staleness: int
    seed: int
    seconds: float
    samples: int
    updates: int
    accuracy: float
    blocked: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


def run(folder: Path, options: Options) -> Report:
    settings = options.settings
    samples, even_samples = (2_000 if options.quick else int(settings[key]) for key in ("samples", "even_samples"))
    runs = [
        measure(folder, slowness, staleness, seed, count, settings)
        for seed in options.seeds
        for slowness, count in ((float(settings["slowness"]), samples), (1.0, even_samples))
        for staleness in (EXACT, int(settings["staleness"]))
    ]
    return report_of(runs)


def measure(folder: Path, slowness: float, staleness: int, seed: int, samples: int, settings: Mapping[str, str]) -> Run:
    """One run, whose folder is created in `folder`. Raises RuntimeError if it or its audit fails."""
    batch_s = float(settings["batch_s"])
    job = load(
        JOBS / "digits" / "job.yaml",
        [
            f"seed={seed}", f"stop={{samples: {samples}}}", "arrivals={process: asap}", "evaluation.every_s=0.5",
            f"training.policy={{name: doll, group_size: {settings['group_size']}, staleness: {staleness}}}",
        ],
    )  # fmt: skip
    task = {"class": "benchmarks.live.paced:PacedDigits", "args": {"batch_s": batch_s}}
    job = job.model_copy(update={"task": job.task.model_validate(task)})
    parent = folder / f"{seed}-{slowness:g}-{staleness}"
    report = run_up(job, parent, hook=lambda *_: OneSlowWorker(slowness))
    if report["exit_code"] or not report["audit"]["ok"]:
        raise RuntimeError(f"staleness {staleness}, seed {seed}: {report['error'] or report['reason']}")
    (run_folder,) = (path for path in parent.iterdir() if path.is_dir())
    rows = [row for row in read_rows(run_folder / "evaluations.csv") if not row.get("void")]
    late = [row["accuracy"] for row in rows if row["version"] > 2 / 3 * report["version"]]
    return Run(
        slowness, staleness, seed, report["training_seconds"], report["samples"], report["updates"],
        statistics.mean(late), report["measures"]["blocked_share"],
    )  # fmt: skip


def of(runs: Sequence[Run], slowness: float, staleness: bool) -> list[Run]:
    """Those of this slowness, with recent versions or with exact ones, by seed."""
    return [each for each in runs if each.slowness == slowness and bool(each.staleness) == staleness]


def ratios(runs: Sequence[Run], slowness: float) -> list[float]:
    """Samples per second with recent versions by those with exact ones, for each seed."""
    pairs = zip(of(runs, slowness, True), of(runs, slowness, False), strict=True)
    return [recent.samples_per_s / exact.samples_per_s for recent, exact in pairs]


def gaps(runs: Sequence[Run], slowness: float) -> list[float]:
    """Accuracy with recent versions minus that with exact ones, in points, for each seed."""
    pairs = zip(of(runs, slowness, True), of(runs, slowness, False), strict=True)
    return [100 * (recent.accuracy - exact.accuracy) for recent, exact in pairs]


def report_of(runs: Sequence[Run]) -> Report:
    slow = max(each.slowness for each in runs)
    seeds = sorted({each.seed for each in runs})
    table = Table(
        "The same samples with exact and with recent versions; worker 0 takes so many times as long",
        ("slowness", "versions", "samples/s", "times exact", "accuracy", "points to exact", "blocked"),
        left=("versions",),
    )
    for slowness in (slow, 1.0):
        for is_recent in (False, True):
            some = of(runs, slowness, is_recent)
            table.rows.append([
                f"{slowness:g}", f"recent, τ = {some[0].staleness}" if is_recent else "exact",
                mean_sd([each.samples_per_s for each in some], 0),
                mean_sd(ratios(runs, slowness), 2) if is_recent else "1",
                mean_sd([each.accuracy for each in some], 4),
                mean_sd(gaps(runs, slowness), 2) if is_recent else "0",
                f"{100 * statistics.mean(each.blocked for each in some):.0f} %",
            ])  # fmt: skip
    faster, even = statistics.mean(ratios(runs, slow)), statistics.mean(ratios(runs, 1.0))
    gap = statistics.mean(gaps(runs, slow))
    claims = [
        _claim(f"one worker {slow:g} times slower: samples/s, times exact", ">= 1.7", f"{faster:.2f}", faster >= 1.7),
        _claim("its accuracy beside that with exact versions, points", ">= -0.5", f"{gap:+.2f}", gap >= -0.5),
        _claim("no slow worker: samples/s, times exact", ">= 0.97", f"{even:.2f}", even >= 0.97),
    ]
    return Report(
        "Groups of recent versions beside one slow worker",
        [table],
        seeds,
        f"± is the standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else "one run: no spread is known",
        claims=claims,
        notes=["The bars are those of the project: the papers have no such job."],
        data={"runs": [asdict(each) for each in runs]},
    )


def _claim(claim: str, bar: str, ours: str, is_met: bool) -> Claim:
    return Claim(claim, bar, ours, *(("reproduced", "") if is_met else ("not reproduced", "see the table")))
