"""The policies on one task, over several seeds: the digits at one step size, as `doll compare` runs them.

Each run is a whole `doll up`: the same stream at the same times for each policy of a seed, and other weights and other
samples for each seed. Figures are means and standard deviations over the seeds. With `--folder`, a run that was made
before is read and not repeated.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from doll.amounts import byte_size
from doll.config import load
from doll.local.kafka_broker import LocalKafka
from doll.run.local.up import run_up
from doll.theory.staleness import Histogram

from benchmarks.live.experiment import JOBS, Options, Report, mean_sd
from benchmarks.tables import Table

NAME: Final = "policies"
PAPER: Final = "all four papers: their consistency models on one task"
SEEDS: Final = (0, 1, 2, 3, 4)
SETTINGS: Final = {
    "policies": "doll,bsp,asp,ssp,ssp:staleness=15,essp,essp:staleness=15,vap,isp,wsp",
    "rate": "0.01",  # step size
    "samples": "16000",
}
DIVERGED: Final = 1e6  # a loss


@dataclass(frozen=True)
class Run:
    """One run; `loss`: held out, or of the last updates where nothing is held out. Infinite: it has diverged."""

    policy: str
    seed: int
    loss: float
    updates: int
    samples: int
    staleness: dict[str, int]  # number of reads by difference
    mean_staleness: float
    counted_share: float
    blocked_share: float
    gradient_bytes: int
    weights_bytes: int


def policy_section(label: str) -> str:
    """The section `training.policy` for `NAME[:KEY=VALUE...]`, with the steps of the papers' algorithms."""
    name, *options = label.split(":")
    return f"{{{', '.join([f'name: {name}', *(option.replace('=', ': ') for option in options)])}}}"


def read_run(label: str, seed: int, report: dict[str, Any]) -> Run:
    """A run from its report.json.

    Raises:
        RuntimeError: the run has neither reached its stop rule nor diverged.
    """
    measures, loss, staleness = report["measures"], report["loss"], report["measures"]["staleness"]
    if not report["diverged"] and (report["error"] or report["samples"] < report["stop"]["samples"]):
        raise RuntimeError(f"{label}, seed {seed}: the run has ended early: {report['error'] or report['reason']}")
    loss = report["prequential"]["window_loss"] if loss is None else loss
    is_finite = not report["diverged"] and loss is not None and loss < DIVERGED
    return Run(
        label, seed, loss if is_finite else math.inf, report["updates"], report["samples"], staleness["histogram"],
        staleness["mean"] or math.nan, staleness["counted_share"] or math.nan, measures["blocked_share"] or math.nan,
        measures["bytes"]["gradients"], measures["bytes"]["weights"],
    )  # fmt: skip


def runs_of(job: Path, changes: Sequence[str], options: Options, folder: Path) -> Iterator[Run]:
    """All policies of one seed, then those of the next, on one broker. A run that the folder has is not repeated."""
    with ExitStack() as stack:

        @cache
        def kafka_address() -> str:
            data = Path(stack.enter_context(TemporaryDirectory()))
            return stack.enter_context(LocalKafka(data)).address

        for seed in options.seeds:
            for label in options.settings["policies"].split(","):
                own = folder / f"{label.replace(':', '-').replace('=', '-')}-{seed}"
                report = own / "report.json"  # of this run; run folders are beside it
                if not report.is_file():
                    own.mkdir(exist_ok=True)
                    more = [f"training.policy={policy_section(label)}", f"seed={seed}", f"job={own.name}"]
                    made = run_up(load(job, [*changes, *more, f"kafka.address={kafka_address()}"]), own)
                    run = read_run(label, seed, made)
                    report.write_text(json.dumps(made), encoding="utf-8")
                else:
                    run = read_run(label, seed, json.loads(report.read_text(encoding="utf-8")))
                print(
                    f"{label}, seed {seed}: {run.loss:.4g}, {run.updates} updates, staleness {run.mean_staleness:.2f} "
                    f"of {100 * run.counted_share:.1f} %",
                    flush=True,
                )
                yield run


def of_seeds(values: Sequence[float], digits: int) -> str:
    """Their mean and standard deviation; without what is not finite, whose number is named."""
    finite = [value for value in values if math.isfinite(value)]
    lost = f"{len(values) - len(finite)} of {len(values)} diverged" if len(finite) < len(values) else ""
    return ", ".join(part for part in (mean_sd(finite, digits) if finite else "", lost) if part)


def table(title: str, runs: Sequence[Run], digits: int = 3) -> Table:
    """A line for each policy."""
    columns = (
        "policy", "last loss", "updates", "samples", "staleness, mean", "1 % are staler than", "reads counted",
        "blocked", "gradients", "weights",
    )  # fmt: skip
    result = Table(title, columns, left=("policy",))
    for label in dict.fromkeys(run.policy for run in runs):
        mine = [run for run in runs if run.policy == label]
        histogram = Histogram()
        for run in mine:
            histogram.merge(Histogram({int(key): count for key, count in run.staleness.items()}))
        blocked = statistics.fmean(run.blocked_share for run in mine)
        result.rows.append(
            [
                label, of_seeds([run.loss for run in mine], digits),
                f"{statistics.fmean(run.updates for run in mine):.0f}",
                f"{statistics.fmean(run.samples for run in mine):,.0f}",
                of_seeds([run.mean_staleness for run in mine], 2), f"{histogram.percentile(1.0):g}",
                f"{100 * min(run.counted_share for run in mine):.4g} %", f"{100 * blocked:.0f} %",
                byte_size(round(statistics.fmean(run.gradient_bytes for run in mine))),
                byte_size(round(statistics.fmean(run.weights_bytes for run in mine))),
            ]
        )  # fmt: skip
    return result


def run(folder: Path, options: Options) -> Report:
    samples = 2000 if options.quick else int(options.settings["samples"])
    rate = options.settings["rate"]
    changes = [f"stop={{samples: {samples}}}", f"training.optimizer.lr={rate}"]
    runs = list(runs_of(JOBS / "digits" / "job.yaml", changes, options, folder))
    return Report(
        "Consistency models on one task",
        [table(f"The digits, step size {rate}, {samples:,} samples", runs)],
        options.seeds,
        "one run each, so the spread is not known" if len(options.seeds) == 1 else "standard deviation over the seeds",
        notes=[
            "All policies have the same step size, which is the best one of none of them. Four batches together "
            "make a step of this size; policies whose workers make steps add a fourth of each as they come.",
            "A read counts once for each other live worker; `reads counted` is the lowest share of all runs.",
        ],
        data={"runs": [asdict(run) for run in runs]},
    )
