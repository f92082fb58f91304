"""ESSP's comparison: MF of MovieLens 1M and LDA of Reuters under SSP, ESSP, VAP, BSP and ASP, with a straggler.

Four workers are compute-bound: each has its data from the beginning, a batch takes a time of its own, and one worker is
slower than the others (`benchmarks.live.slow_tasks`). All runs take as long; what differs is the policy and, for MF,
the step size. Each policy is shown at its best step size. Topics have no step size: a step is what a batch changes in
the counts.

The jobs run one after the other in this process, each with its own server and workers, on one broker. With `--folder`,
a run that was made before is read and not repeated.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from doll.config import load
from doll.local.kafka_broker import LocalKafka
from doll.run.local.up import run_up
from doll.theory.staleness import Histogram

from benchmarks.live.experiment import JOBS, Claim, Options, Report
from benchmarks.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME: Final = "essp"
PAPER: Final = "Dai et al. 2015, Figs. 1 and 2"
SETTINGS: Final = {
    "tasks": "ratings,topics",
    "policies": "bsp,asp,vap,ssp:1,ssp:3,ssp:7,ssp:15,essp:1,essp:3,essp:7,essp:15",
    "rates": "40,80",  # step sizes of MF: of the mean gradient of a batch of 2,048 ratings
    "seconds": "15",  # of learning
    "slowdown": "1.5",  # of the straggler
}
TOLERANCE: Final = 0.005  # of a loss: runs of one seed differ by about as much
TITLES: Final = {"ratings": "MF of MovieLens 1M", "topics": "LDA of Reuters-21578"}
_EXAMPLES: Final = {"ratings": "ratings", "topics": "lda"}
_WORKERS: Final = 4
# Of the largest change of a number that a view misses: v_0 / sqrt(t).
_VALUE_BOUND: Final = {"ratings": 20.0, "topics": 5000.0}
_DIVERGED: Final = 1e6


class Run(NamedTuple):
    """One run.

    Attributes:
        rate: step size; 0: the task has none.
        loss: held out, at the end; infinite where the run has diverged.
        curve: (seconds, samples, held-out loss).
        staleness: how often each difference was seen.
    """

    task: str
    policy: str
    bound: int | None
    rate: float
    seed: int
    loss: float
    samples: int
    updates: int
    blocked_share: float
    curve: list[tuple[float, int, float]]
    staleness: dict[str, int]
    mean_staleness: float

    @property
    def label(self) -> str:
        return self.policy if self.bound is None else f"{self.policy} s={self.bound}"

    def loss_at(self, samples: int) -> float:
        """Held out, once so many samples were learned; infinite where the run has not learned so many."""
        return next((loss for _, learned, loss in self.curve if learned >= samples), math.inf)


def policy_of(label: str, task: str) -> str:
    """The section `training.policy` for `NAME` or `NAME:s`."""
    name, _, bound = label.partition(":")
    if bound:  # the kept figures are of one batch under way
        return f"{{name: {name}, contributions: sum, staleness: {bound}, under_way: 1}}"
    if name == "vap":
        return f"{{name: vap, contributions: sum, value_bound: {_VALUE_BOUND[task]}}}"
    return f"{{name: {name}, contributions: sum, contribution: step}}"


def changes_of(task: str, options: Options, folder: Path) -> list[str]:
    """What the job file of the example is changed to."""
    clock_s = {"ratings": 0.08, "topics": 0.15}[task]
    shared = [
        f"data.workers={_WORKERS}", "arrivals.process=asap", "worker.max_pending_batches=32",
        "checkpoint={every_updates: 1000000, every_s: 1}", f"task.args.clock_s={clock_s}",
        f"task.args.slowdown={options.settings['slowdown']}", f"task.args.straggler_file={folder / 'straggler'}",
        f"stop={{seconds: {'5' if options.quick else options.settings['seconds']}}}",
    ]  # fmt: skip
    if task == "ratings":
        path = options.file("movielens_1m/ratings.csv.gz", "the ratings of MovieLens 1M (user,item,rating)")
        return [
            *shared, "task.class=benchmarks.live.slow_tasks:SlowRatings", "task.args.sparse=true",
            f"task.args.ratings_path={path}", f"source.args.ratings_path={path}", "data.batch_size=2048",
        ]  # fmt: skip
    path = options.file("reuters21578/docs.jsonl.gz", "the texts of Reuters-21578 as JSON lines")
    return [
        *shared, "task.class=benchmarks.live.slow_tasks:SlowTopics", f"task.args.holdout_path={path}",
        f"source.path={path}", "data.batch_size=64", "task.args.sweeps=1", "source.skip=10000",
    ]  # fmt: skip


def read_run(task: str, label: str, rate: float, seed: int, report: dict[str, Any]) -> Run:
    """A run from its report.json and the tables that it names."""
    measures, files = report["measures"], report["files"]
    with Path(files["updates"]).open(encoding="utf-8") as rows:
        updates = list(csv.DictReader(rows))
    with Path(files["evaluations"]).open(encoding="utf-8") as rows:
        evaluations = list(csv.DictReader(rows))
    begun_s = float(evaluations[0]["time_s"])
    learned = {0: 0} | {int(row["version"]): int(row["samples_total"]) for row in updates}
    curve = [
        (float(row["time_s"]) - begun_s, learned.get(int(row["version"]), 0), float(row["loss"]))
        for row in evaluations
        if row["loss"] and math.isfinite(float(row["loss"]))
    ]
    loss = report["loss"]
    is_finite = report["error"] is None and loss is not None and loss < _DIVERGED
    name, _, bound = label.partition(":")
    staleness = measures["staleness"]
    return Run(
        task, name, int(bound) if bound else None, rate, seed, loss if is_finite else math.inf, report["samples"],
        report["updates"], measures["blocked_share"] or 0.0, curve, staleness["histogram"], staleness["mean"] or 0.0,
    )  # fmt: skip


def runs_of(folder: Path, options: Options, kafka_address: Callable[[], str]) -> Iterator[Run]:
    """Each policy at each task, step size and seed: those of one policy one after the other."""
    for seed in options.seeds:
        for label in options.settings["policies"].split(","):
            for task in options.settings["tasks"].split(","):
                for rate in (
                    [float(word) for word in options.settings["rates"].split(",")] if task == "ratings" else [0.0]
                ):
                    own = folder / f"{task}-{label.replace(':', '-')}-{rate:g}-{seed}"
                    kept = own / "run.json"
                    if not kept.is_file():
                        _learn(task, label, rate, seed, own, options, kafka_address())
                    run = Run(**json.loads(kept.read_text(encoding="utf-8")))
                    print(
                        f"{task} {run.label} at {rate:g}: {run.loss:.4f}, staleness {run.mean_staleness:.2f}",
                        flush=True,
                    )
                    yield run


def _learn(task: str, label: str, rate: float, seed: int, own: Path, options: Options, kafka_address: str) -> None:
    """One run, which is kept in the folder `own`."""
    own.mkdir(exist_ok=True)
    (own / "straggler").unlink(missing_ok=True)
    changes = [*changes_of(task, options, own), f"training.policy={policy_of(label, task)}"]
    changes += [f"seed={seed}", f"job={own.name}", f"kafka.address={kafka_address}"]
    if rate:
        changes.append(f"training.optimizer.lr={rate!r}")
    report = run_up(load(JOBS / _EXAMPLES[task] / "job.yaml", changes), own)
    (own / "run.json").write_text(json.dumps(read_run(task, label, rate, seed, report)._asdict()), encoding="utf-8")


def best_of(runs: Sequence[Run]) -> list[Run]:
    """Of each policy, task and seed, the run at the step size with the lowest mean loss over seeds."""
    best: list[Run] = []
    for key in dict.fromkeys((run.task, run.label) for run in runs):
        mine = [run for run in runs if (run.task, run.label) == key]
        losses = {rate: [run.loss for run in mine if run.rate == rate] for rate in {run.rate for run in mine}}
        rate = min(losses, key=lambda rate: (sum(losses[rate]) / len(losses[rate]), rate))
        best += [run for run in mine if run.rate == rate]
    return best


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(task: str, best: Sequence[Run]) -> Table:
    """A line for each policy at its best step size; means over seeds."""
    mine = [run for run in best if run.task == task]
    samples = min(run.samples for run in mine)
    columns = (
        "policy", "step size", "loss at the end", "samples", f"loss at {samples:,} samples", "mean staleness",
        "1 % are staler than", "blocked",
    )  # fmt: skip
    result = Table(f"{TITLES[task]}, each policy at its best step size", columns, left=("policy",))
    for label in dict.fromkeys(run.label for run in mine):
        of_label = [run for run in mine if run.label == label]
        histogram = Histogram()
        for run in of_label:
            histogram.merge(Histogram({int(key): count for key, count in run.staleness.items()}))
        result.rows.append(
            [
                label, f"{of_label[0].rate:g}" if of_label[0].rate else "none",
                f"{_mean([run.loss for run in of_label]):.4f}", f"{_mean([run.samples for run in of_label]):,.0f}",
                f"{_mean([run.loss_at(samples) for run in of_label]):.4f}",
                f"{_mean([run.mean_staleness for run in of_label]):.2f}", f"{histogram.percentile(1.0):g}",
                f"{100 * _mean([run.blocked_share for run in of_label]):.0f} %",
            ]
        )  # fmt: skip
    return result


def grid(task: str, runs: Sequence[Run]) -> Table:
    """Losses at the end by policy and step size; means over seeds."""
    mine = [run for run in runs if run.task == task]
    rates = sorted({run.rate for run in mine})
    result = Table(f"{TITLES[task]}: loss at the end by step size", ("policy", *(f"{rate:g}" for rate in rates)),
                   left=("policy",))  # fmt: skip
    for label in dict.fromkeys(run.label for run in mine):
        losses = [[run.loss for run in mine if (run.label, run.rate) == (label, rate)] for rate in rates]
        result.rows.append([label, *(f"{_mean(each):.4f}" if each else "" for each in losses)])
    return result


def claims(task: str, best: Sequence[Run]) -> list[Claim]:
    """What the paper says of SSP and ESSP, at each s that both have run at."""
    mine = [run for run in best if run.task == task]

    def mean(name: str, bound: int, what: str) -> float:
        return _mean([getattr(run, what) for run in mine if (run.policy, run.bound) == (name, bound)])

    bounds = sorted({run.bound for run in mine if run.policy == "essp" and run.bound is not None}
                    & {run.bound for run in mine if run.policy == "ssp" and run.bound is not None})  # fmt: skip
    if not bounds:
        return []
    fresher = [
        bound for bound in bounds if mean("essp", bound, "mean_staleness") > mean("ssp", bound, "mean_staleness")
    ]
    losses = {bound: (mean("ssp", bound, "loss"), mean("essp", bound, "loss")) for bound in bounds}
    good = [bound for bound, (ssp, essp) in losses.items() if essp <= ssp * (1 + TOLERANCE)]
    shown = ", ".join(f"s = {bound}: {essp:.4f} and {ssp:.4f}" for bound, (ssp, essp) in losses.items())
    stale = ", ".join(
        f"s = {bound}: {mean('essp', bound, 'mean_staleness'):.2f} and {mean('ssp', bound, 'mean_staleness'):.2f}"
        for bound in bounds
    )
    essp = [losses[bound][1] for bound in bounds]
    spread, widest = (
        max(essp) / min(essp) - 1,
        max(ssp for ssp, _ in losses.values()) / min(ssp for ssp, _ in losses.values()) - 1,
    )
    return [
        _claim(f"{TITLES[task]}: ESSP reads fresher weights than SSP at each s", "Fig. 1", stale,
               [bound for bound in bounds if bound not in fresher], "SSP reads fresher ones"),
        _claim(f"{TITLES[task]}: after the same time ESSP's loss is no worse than SSP's (within {100 * TOLERANCE:g} %)",
               "Fig. 2", shown, [bound for bound in bounds if bound not in good], "it is worse"),
        _claim(f"{TITLES[task]}: ESSP's loss depends less on s than SSP's", "Fig. 2",
               f"{100 * spread:.1f} % and {100 * widest:.1f} % from the lowest to the highest",
               [] if spread <= widest else bounds, "it depends as much on s: no step size here lets SSP diverge"),
    ]  # fmt: skip


def _claim(claim: str, paper: str, ours: str, missed: Sequence[int], why: str) -> Claim:
    if not missed:
        return Claim(claim, paper, ours, "reproduced")
    return Claim(claim, paper, ours, "not reproduced", f"{why} at s = {', '.join(map(str, missed))}")


def run(folder: Path, options: Options) -> Report:
    tasks = options.settings["tasks"].split(",")
    with ExitStack() as stack:

        @cache
        def kafka_address() -> str:
            data = Path(stack.enter_context(TemporaryDirectory()))
            return stack.enter_context(LocalKafka(data)).address

        runs = list(runs_of(folder, options, kafka_address))
    best = best_of(runs)
    return Report(
        "ESSP: five policies with a straggler",
        [*(table(task, best) for task in tasks), *(grid(task, runs) for task in tasks if task == "ratings")],
        options.seeds,
        "one run each, so the spread is not known" if len(options.seeds) == 1 else "means over the seeds",
        claims=[claim for task in tasks for claim in claims(task, best)],
        notes=[
            f"{_WORKERS} workers; a batch takes its arithmetic and a sleep of 80 ms (MF) or 150 ms (LDA) times "
            "Gamma(20) / 20, one in 20 twice that; one worker "
            f"{options.settings['slowdown']} times as long. Each run learns for {options.settings['seconds']} s.",
            "A difference is the newest batch of another worker in what is read, minus the number of the batch that is "
            "computed: -1 under bsp. Staleness is of the version that a batch begins with; rows that are asked for may "
            "be newer.",
            "Models have tables, so held-out losses are those of checkpoints, one a second.",
            f"vap: v_0 = {_VALUE_BOUND['ratings']:g} for MF and {_VALUE_BOUND['topics']:g} for LDA.",
        ],
        data={"runs": [run._asdict() for run in best]},
    )


def draw(figure: Figure, data: dict[str, Any]) -> None:
    """Staleness of SSP and ESSP at the largest s, and loss against time, of each task."""
    from doll_lab.figures import decorate

    runs = [Run(**run) for run in data["runs"]]
    tasks = list(dict.fromkeys(run.task for run in runs))
    panels = figure.subplots(1, 2 * len(tasks), squeeze=False)[0]
    for number, task in enumerate(tasks):
        mine = [run for run in runs if run.task == task and run.seed == runs[0].seed]
        highest = max((run.bound for run in mine if run.bound is not None), default=0)
        left, right = panels[2 * number], panels[2 * number + 1]
        for run, color in ((run, {"ssp": "#b45309", "essp": "#2563eb"}[run.policy]) for run in mine
                           if run.policy in ("ssp", "essp") and run.bound == highest):  # fmt: skip
            total = sum(run.staleness.values())
            points = sorted((int(key), 100 * count / total) for key, count in run.staleness.items())
            left.plot(*zip(*points, strict=True), color=color, linewidth=1.3, label=run.label)
        for run in mine:
            if run.bound in (None, highest):
                right.plot([time_s for time_s, _, _ in run.curve], [loss for _, _, loss in run.curve], linewidth=1.1,
                           label=run.label)  # fmt: skip
        decorate(left, f"{task}: staleness", "newest batch read - own batch", "% of reads")
        decorate(right, f"{task}: held-out loss", "seconds", "")
        lowest = min(loss for run in mine for _, _, loss in run.curve)
        right.set_ylim(0.98 * lowest, 1.25 * lowest)
        for axes in (left, right):
            axes.legend(fontsize=6, frameon=False)
