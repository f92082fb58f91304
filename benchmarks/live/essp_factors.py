"""ESSP's claim on a job: at one step size SSP diverges where the bound is high, and ESSP does not.

Matrix factorization as in the ESSP paper's Fig. 2, on drawn ratings: 200 x 150 of rank 5, 30 % observed, noise 0.1, so
that 0.01 is the lowest loss. Eight worker processes, a batch is 10 % of a worker's share; each run is a `doll up`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.live.experiment import JOBS, Claim, Options, Report
from benchmarks.live.policies import Run, of_seeds, runs_of, table

NAME: Final = "essp_factors"
PAPER: Final = "Dai et al. 2015, Fig. 2"
SEEDS: Final = (0, 1, 2, 3, 4)
SETTINGS: Final = {
    "policies": "ssp,ssp:staleness=31,essp,essp:staleness=31",
    "rate": "16",  # step size of the mean gradient of a batch
    "samples": "100000",
}
TOLERANCE: Final = 0.1  # of a loss: what the simulation of Fig. 2 allows ESSP's to differ by over s
_LOW, _HIGH = "ssp", "ssp:staleness=31"
_ESSP_LOW, _ESSP_HIGH = "essp", "essp:staleness=31"


def claims(runs: Sequence[Run]) -> list[Claim]:
    """What the paper says of the highest bound, of each seed."""
    labels = dict.fromkeys(run.policy for run in runs)
    losses = {label: [run.loss for run in runs if run.policy == label] for label in labels}
    if not {_LOW, _HIGH, _ESSP_LOW, _ESSP_HIGH} <= losses.keys():
        return []
    seeds = len(losses[_HIGH])
    worse = sum(high > 5 * low for high, low in zip(losses[_HIGH], losses[_LOW], strict=True))
    lower = sum(essp < ssp for essp, ssp in zip(losses[_ESSP_HIGH], losses[_HIGH], strict=True))
    flat = sum(
        abs(high / low - 1) <= TOLERANCE for high, low in zip(losses[_ESSP_HIGH], losses[_ESSP_LOW], strict=True)
    )
    last = "SSP(3) and SSP(31): " + " and ".join(of_seeds(losses[label], 4) for label in (_LOW, _HIGH))
    essp = "ESSP(3) and ESSP(31): " + " and ".join(of_seeds(losses[label], 4) for label in (_ESSP_LOW, _ESSP_HIGH))
    return [
        _claim("SSP(31) diverges, or ends at more than 5 times SSP(3)'s loss", worse, seeds, last),
        _claim("ESSP(31) ends at a lower loss than SSP(31)", lower, seeds, last),
        _claim(f"ESSP(31) ends at ESSP(3)'s loss (within {100 * TOLERANCE:g} %)", flat, seeds, essp),
    ]


def _claim(claim: str, count: int, seeds: int, last: str) -> Claim:
    ok = count == seeds
    ours = f"{count} of {seeds} seeds; {last}" if ok else f"{count} of {seeds} seeds"
    return Claim(claim, "Fig. 2", ours, "reproduced" if ok else "not reproduced", "" if ok else last)


def run(folder: Path, options: Options) -> Report:
    samples = 5000 if options.quick else int(options.settings["samples"])
    rate = options.settings["rate"]
    changes = [
        "data.workers=8", "data.batch_size=128", "arrivals.rate_per_s=640", "task.args.users=200",
        "source.args.users=200", "task.args.items=150", "source.args.items=150", "source.args.observed=0.3",
        f"training.optimizer.lr={rate}", f"stop={{samples: {samples}}}",
    ]  # fmt: skip
    runs = list(runs_of(JOBS / "ratings" / "factors.yaml", changes, options, folder))
    return Report(
        "ESSP and SSP at a high bound",
        [table(f"Matrix factorization, step size {rate}, {samples:,} samples", runs, 4)],
        options.seeds,
        "one run each, so the spread is not known" if len(options.seeds) == 1 else "standard deviation over the seeds",
        claims=claims(runs),
        notes=[
            "8 workers, 640 ratings/s each, 128 a batch; policies without a bound in the name have s = 3.",
            "A read counts once for each other live worker; `reads counted` is the lowest share of all runs.",
        ],
        data={"runs": [asdict(run) for run in runs]},
    )
