"""What `under_way` of ssp and essp brings where a message takes long: blocked time, staleness and samples per second.

Each row is one `doll up` of the digits for a fixed time. A batch takes `batch_s` seconds, and each worker reaches
Redis, which has its grants, pushes, weights and steps, through a relay by which each byte comes `delay_s` late.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from doll.config import load
from doll.run.local.up import run_up

from benchmarks.live import slow_network
from benchmarks.live.experiment import JOBS, Options, Report
from benchmarks.tables import Table

NAME: Final = "essp_delay"
PAPER: Final = "Dai et al. 2015, Fig. 1 right"
SETTINGS: Final = {
    "policies": "ssp:3,essp:3",
    "under_way": "1,2,4",
    "batch_s": "0.1",
    "delay_s": "0,0.05",  # of a message, in each direction
    "seconds": "8",  # of learning, per run
}


@dataclass(frozen=True)
class Row:
    """One run; `blocked`: share of the workers' time; `samples_per_s` of all workers."""

    policy: str
    delay_s: float
    under_way: int
    seed: int
    blocked: float
    staleness: float
    samples_per_s: float
    loss: float | None


def run_one(folder: Path, label: str, under_way: int, delay_s: float, seed: int, options: Options) -> Row:
    """
    Raises:
        CalledProcessError: the run has failed, or its audit has.
    """
    policy, _, bound = label.partition(":")
    seconds = 3.0 if options.quick else float(options.settings["seconds"])
    config = load(
        JOBS / "digits" / "job.yaml",
        [
            f"seed={seed}",
            f"training.policy={{name: {policy}, contributions: sum, staleness: {bound}, under_way: {under_way}}}",
            "training.optimizer={name: sgd, lr: 0.02}", f"stop={{seconds: {seconds}}}", "arrivals={process: asap}",
            "control.kind=redis", "evaluation.every_s=5", *slow_network.CHANGES,
        ],
    )  # fmt: skip
    args = {"batch_s": float(options.settings["batch_s"]), "hidden": [64]}
    task = config.task.model_validate({"class": "benchmarks.live.paced:PacedDigits", "args": args})
    with slow_network.network(0.0, delay_s) as network:
        report = run_up(config.model_copy(update={"task": task}), folder, hook=lambda run, display: network)
    if report["exit_code"]:
        raise subprocess.CalledProcessError(report["exit_code"], ["doll", "up", "digits", label, str(under_way)])
    measures = report["measures"]
    return Row(
        label, delay_s, under_way, seed, measures["blocked_share"], measures["staleness"]["mean"],
        report["samples"] / seconds, report["loss"],
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """A line for each run."""
    result = Table(
        "Each line is one run",
        ("policy", "message, ms", "under way", "blocked", "mean staleness", "samples/s", "held-out loss"),
        left=("policy",),
    )  # fmt: skip
    for row in rows:
        loss = "–" if row.loss is None else f"{row.loss:.3f}"
        result.rows.append([
            row.policy, f"{1e3 * row.delay_s:g}", str(row.under_way), f"{100 * row.blocked:.1f} %",
            f"{row.staleness:.2f}", f"{row.samples_per_s:.0f}", loss,
        ])  # fmt: skip
    return result


def run(folder: Path, options: Options) -> Report:
    rows = [
        run_one(folder, label, int(under_way), float(delay_s), seed, options)
        for seed in options.seeds
        for delay_s in options.settings["delay_s"].split(",")
        for label in options.settings["policies"].split(",")
        for under_way in options.settings["under_way"].split(",")
    ]
    return Report(
        "ESSP: batches past the worker's own push", [table(rows)], options.seeds,
        "each line is one run, so the spread is not known", data={"rows": [asdict(row) for row in rows]},
    )  # fmt: skip
