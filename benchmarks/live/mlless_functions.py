"""MLLess's table: Perf/$ of functions with the tuner, of functions without it, and of machines, on PMF and LR.

Workers are invocations of a function on AWS's runtime interface emulator (`tests/support/function_world.py` says what
it needs), or processes that are billed as machines. All of them share this machine's cores, so a round of fewer workers
takes less time: this stands for the exchange that grows with the number of workers in MLLess.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from doll.config import load
from doll.errors import DollError
from doll.local import processes
from doll.local.supervisor import Supervisor
from doll.monitor.state.progress import ProgressModel
from doll.provisioner.billing import EC2_LINUX
from doll.records.control import AnyRecord, Finished, Update
from doll.run.local.context import LocalRun, RunHook
from doll.run.local.up import run_up
from doll.services import KAFKA_ENV, REDIS_ENV

from benchmarks.live import mlless_clicks, mlless_filter, mlless_ratings, sparse_allreduce
from benchmarks.live.experiment import Claim, Options, Report, Skip, mean_sd
from benchmarks.live.mlless_filter import Learned
from benchmarks.tables import Table

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))  # of the emulator, as in benchmarks.functions

NAME: Final = "mlless_functions"
PAPER: Final = "MLLess, sections 4.2 and 6.2, Fig. 5 to 7"
ARMS: Final = ("functions", "tuned functions", "machines", "all-reduce machines")
SETTINGS: Final = {
    "jobs": "PMF,LR",
    "arms": ",".join(ARMS),  # MLLess's machines run PyTorch's all-reduce: a sparse one, where it is available
    "workers": "6",
    "min_workers": "2",  # which the tuner leaves
    "contributions": "mean",  # of the workers' steps: fewer workers make a step of the same length from fewer samples
    "knee_slope": "-6e-4",  # per update, relative: the default of `provision.scale_in`
    "every_s": "3",  # between two decisions of the tuner; MLLess's T is 20 in jobs several times as long
    "machine_usd_per_h": "0.03625",  # of a worker's machine: half of a c7g.large, on-demand, early 2026
    "pmf_batch_size": "6272",  # ratings: MLLess's 6 K, and a whole number of records
    "pmf_lr": "160",  # of the mean gradient of all workers: no more with the noise of two
    "pmf_loss": "0.765",  # held out
    "lr_batch_size": "1024",  # clicks
    "lr_lr": "0.2",
    "lr_loss": "0.4965",
}
SEEDS: Final = (0, 1, 2)
PLAIN, TUNED, MACHINES, ALL_REDUCE = ARMS
BAR: Final = 1.4  # of MLLess's tuner: 1.4 to 1.5 on LR, up to 1.6 on PMF
MACHINE_BAR: Final = 1.0
_LIMIT_S: Final = 900
_START_S: Final = 300.0  # of all workers, on a busy machine
_END_S: Final = 120.0
_MOST_SAMPLES: Final = 40_000_000  # of the all-reduce, which counts no updates
_RATE_PER_S: Final = 40_000  # of each worker's stream: more than it takes


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        time_s: from the first update to the loss; `usd` is what the workers cost in this time.
        whole_s, whole_usd: from the first launch to the loss, and the whole bill; NaN: not measured.
        workers_left: workers that the tuner has removed.
        missing, twice: offsets, by the audit.
    """

    job: str
    arm: str
    seed: int
    is_reached: bool
    time_s: float
    usd: float
    updates: int
    loss: float
    whole_s: float = float("nan")
    whole_usd: float = float("nan")
    workers_left: int = 0
    missing: int = 0
    twice: int = 0

    @property
    def perf_per_usd(self) -> float:
        """MLLess's Perf/$: 1 / (time x cost)."""
        return 1 / (self.time_s * self.usd)

    @property
    def whole_perf_per_usd(self) -> float:
        """Perf/$ with the starts of all workers."""
        return 1 / (self.whole_s * self.whole_usd)


def usd_since(ended: Iterable[Mapping[str, Any]], from_s: float) -> float:
    """Return the part of the bills of ended instances, lines of the journal, that is for the time after `from_s`."""
    total = 0.0
    for line in ended:
        billed_s = float(line["billed_s"])
        if billed_s > 0:
            total += line["usd"] * max(0.0, min(billed_s, line["ended_s"] - from_s)) / billed_s
    return total


class Clocked(RunHook):
    """Workers as `doll up` starts them, and the Unix times of the first launch, the first update and the end."""

    def __init__(self) -> None:
        self.began_s = self.first_s = self.finished_s = float("nan")

    def start_workers(self, run: LocalRun, supervisor: Supervisor) -> None:
        self.began_s = time.time()
        super().start_workers(run, supervisor)

    def workers_ready(self, model: ProgressModel, waited_s: float) -> bool:
        if waited_s > _START_S:
            raise DollError(f"the workers are not ready after {_START_S:g} s: see the logs of the run")
        return all(line.is_live or line.is_spare for line in model.worker_lines())

    def feed(self, record: AnyRecord) -> None:
        if isinstance(record, Update) and math.isnan(self.first_s):
            self.first_s = time.time()
        elif isinstance(record, Finished):
            self.finished_s = record.time_s


class FunctionWorkers(Clocked):
    """Workers in invocations of a function, which a `doll provision run` of its own orders."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._provisioner: Any = None

    def start_workers(self, run: LocalRun, supervisor: Supervisor) -> None:
        from function_world import FunctionWorld

        self.began_s = time.time()
        services, folder = run.stack.services, run.folder.path
        addresses = {KAFKA_ENV: services.kafka, REDIS_ENV: services.redis}
        env = {**addresses, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        concurrency = 2 * run.config.data.workers
        world = self._stack.enter_context(FunctionWorld(folder / "functions", env, _LIMIT_S, concurrency))
        aws = {"AWS_ENDPOINT_URL": world.url, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
        words = [sys.executable, "-m", "doll", "provision", "run", "--job", str(run.folder.job)]
        self._provisioner = processes.spawn(
            [*words, "--run-folder", str(folder)], folder / "logs" / "provision.log", {**addresses, **aws}
        )

    def tick(self, supervisor: Supervisor, stack: Any) -> str | None:
        if self._provisioner.poll() not in (None, 0):
            raise DollError("the provisioner has ended: see logs/provision.log of the run")
        return None

    def close(self) -> None:
        if self._provisioner is not None:
            with suppress(subprocess.TimeoutExpired):
                # It ends the workers when the job has finished, and bills them; there is nothing to wait for otherwise.
                self._provisioner.wait(_END_S if not math.isnan(self.finished_s) else 0.1)
            self._provisioner.kill()
            self._stack.close()
            self._provisioner = None


def changes_of(job: str, options: Options) -> tuple[Learned, list[str]]:
    """Of the job file of PMF or LR, without a fleet."""
    asked, key = options.settings, job.lower()
    module: Any = {"PMF": mlless_ratings, "LR": mlless_clicks}[job]
    own = {"batch_size": asked[f"{key}_batch_size"], "lr": asked[f"{key}_lr"], "samples": ""}
    given = replace(options, quick=False, settings={**module.SETTINGS, **own, "rate_per_s": str(_RATE_PER_S)})
    most = 20 if options.quick else 20_000
    return module.LEARNED, [
        *mlless_filter.changes_of(module.LEARNED, given, "dense"), f"data.workers={asked['workers']}",
        f"training.policy={{name: isp, contributions: {asked['contributions']}, significance: 0.7}}",
        "blobs.kind=redis",
        f"stop={{loss: {asked[f'{key}_loss']}, updates: {most}}}", "worker.drain_s=4",
    ]  # fmt: skip


def run_one(job: str, arm: str, seed: int, folder: Path, options: Options) -> Row:
    """One run of one arm."""
    asked = options.settings
    learned, changes = changes_of(job, options)
    changes.append(f"seed={seed}")
    if arm != MACHINES:
        from function_world import NAME as FUNCTION

        tuner = (
            f"{{enabled: {arm == TUNED}, every_s: {asked['every_s']}, horizon_s: {asked['every_s']}, "
            f"min_workers: {asked['min_workers']}, knee_slope: {asked['knee_slope']}}}"
        )
        changes += [
            f"fleet={{kind: lambda, function: {FUNCTION}, region: us-east-1, timeout_s: {_LIMIT_S}, start_s: 60, "
            f"folder: {learned.job.parent}}}",
            "plan={deadline_s: 100000, boot_s: 60}", f"provision={{every_s: 1, scale_in: {tuner}}}",
        ]  # fmt: skip
    hook = Clocked() if arm == MACHINES else FunctionWorkers()
    folder.mkdir(parents=True)
    report = run_up(load(learned.job, changes), folder, hook=lambda *_: hook)
    if report["exit_code"]:
        raise DollError(f"{folder}: {report['error']}")
    time_s, whole_s = hook.finished_s - hook.first_s, hook.finished_s - hook.began_s
    workers, removed = int(asked["workers"]), 0
    if arm == MACHINES:
        usd_per_s = workers * float(asked["machine_usd_per_h"]) / 3600
        usd, whole_usd = (EC2_LINUX.billed_s(seconds) * usd_per_s for seconds in (time_s, whole_s))
    else:
        (journal,) = max(folder.iterdir()).glob("provision-*.jsonl")
        entries = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
        ended = [entry for entry in entries if entry["kind"] == "ended"]
        usd, whole_usd = usd_since(ended, hook.first_s), usd_since(ended, 0.0)
        kinds = [entry["kind"] for entry in entries]
        removed = kinds.count("release") - kinds.count("recall")
    audit, loss = report["audit"], float(report["best_loss"])
    is_reached = loss <= float(asked[f"{job.lower()}_loss"])
    return Row(
        job, arm, seed, is_reached, time_s, usd, report["updates"], loss, whole_s, whole_usd, removed,
        audit["missing"], audit["duplicate"],
    )  # fmt: skip


def run_all_reduce(job: str, seed: int, options: Options) -> Row:
    """PyTorch's all-reduce on the same data, billed as machines. Its steps are added, those of the others averaged."""
    asked = options.settings
    learned, changes = changes_of(job, options)
    workers, loss = int(asked["workers"]), float(asked[f"{job.lower()}_loss"])
    report = sparse_allreduce.measure(
        learned.job, [*changes, "task.args.sparse=true", f"seed={seed}", f"stop.samples={_MOST_SAMPLES}"],
        lr=float(asked[f"{job.lower()}_lr"]) / workers, mbit_per_s=0,
    )  # fmt: skip
    time_s, best = report["training_seconds"], float(report["best_loss"])
    usd = workers * float(asked["machine_usd_per_h"]) / 3600 * EC2_LINUX.billed_s(time_s)
    return Row(job, ALL_REDUCE, seed, best <= loss, time_s, usd, report["updates"], best)


def run(folder: Path, options: Options) -> Report:
    from function_world import unavailable_reason

    if (reason := unavailable_reason()) is not None:
        raise Skip(reason)
    asked = options.settings
    rows: list[Row] = []
    missing = ""
    for job in asked["jobs"].split(","):
        for seed in options.seeds:
            for arm in asked["arms"].split(","):
                try:
                    if arm != ALL_REDUCE:
                        rows.append(run_one(job, arm, seed, folder / f"{job}-{arm.replace(' ', '-')}-{seed}", options))
                    elif not options.quick:
                        rows.append(run_all_reduce(job, seed, options))
                except Skip as reason_of:
                    missing = f" The all-reduce was not run: {reason_of}."
                print(table(rows).text(), flush=True)
    count = len(options.seeds)
    return Report(
        "MLLess: functions with and without the tuner, and machines",
        [table(rows)],
        options.seeds,
        f"± is the standard deviation of {count} runs" if count > 1 else "one run each",
        claims=claims(rows),
        notes=[
            f"{asked['workers']} workers at first, isp with v = 0.7, the {asked['contributions']} of the workers' "
            f"steps, a decision every {asked['every_s']} s. The others take over the stream of a worker that leaves. "
            "Functions have 1769 MB and are billed by the fleet, machines by EC2's rule (a minute at least) at "
            f"{asked['machine_usd_per_h']} USD per hour and worker.{missing}",
            "Two things favor the tuner here: the step size is one that the last workers bear, so the samples of many "
            "workers are not used up, as in MLLess; and on few cores a round of many workers takes longer. With "
            "contributions=sum the step is shorter with fewer workers.",
            "Time and cost count from the first update; the last columns have them from the first launch. On this "
            "machine all functions load torch at once on the same cores.",
        ],
        data={"rows": [asdict(row) for row in rows]},
    )


def table(rows: Sequence[Row]) -> Table:
    """A line for each job and arm, means over its runs."""
    columns = ("job", "workers", "reached", "left", "time, s", "cost, USD", "updates", "best loss", "Perf/$")
    more = ("missing", "twice", "with starts, s", "with starts, USD")
    result = Table("To the held-out loss of the job", (*columns, *more), left=columns[:2])
    for job, arm in dict.fromkeys((row.job, row.arm) for row in rows):
        mine = [row for row in rows if (row.job, row.arm) == (job, arm)]
        result.rows.append(
            [
                job, arm, f"{sum(row.is_reached for row in mine)} of {len(mine)}",
                mean_sd([row.workers_left for row in mine], 1), mean_sd([row.time_s for row in mine], 1),
                mean_sd([row.usd for row in mine], 5), mean_sd([row.updates for row in mine], 0),
                mean_sd([row.loss for row in mine], 4), mean_sd([row.perf_per_usd for row in mine], 2),
                *(str(sum(getattr(row, name) for row in mine)) for name in ("missing", "twice")),
                mean_sd([row.whole_s for row in mine], 1) if arm != ALL_REDUCE else "",
                mean_sd([row.whole_usd for row in mine], 5) if arm != ALL_REDUCE else "",
            ]
        )  # fmt: skip
    return result


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Runs of one job and seed are compared with each other, if all have reached the loss."""
    by = {(row.job, row.arm, row.seed): row for row in rows if row.is_reached}
    result = []
    for job in dict.fromkeys(row.job for row in rows):
        for arm, other, paper, bar, why in (
            (TUNED, PLAIN, "1.4 to 1.5" if job == "LR" else "up to 1.6", BAR,
             "rounds of fewer workers take not much less time here, or the loss is reached soon after the knee"),
            (TUNED, MACHINES, "no such row", MACHINE_BAR,
             "an hour of a function costs nearly three times that of a worker's machine"),
            (TUNED, ALL_REDUCE, "PMF: 15 times faster than PyTorch, and cheaper", MACHINE_BAR,
             "torch's sparse all-reduce is fast here, and a function's hour costs nearly three times a machine's"),
        ):  # fmt: skip
            pairs = [(row, by.get((job, other, row.seed))) for row in by.values() if (row.job, row.arm) == (job, arm)]
            gains = [row.perf_per_usd / than.perf_per_usd for row, than in pairs if than is not None]
            if not gains:
                continue
            whole = [row.whole_perf_per_usd / than.whole_perf_per_usd for row, than in pairs if than is not None]
            with_starts = f"; with starts {', '.join(f'{gain:.2f}' for gain in whole)}" if other != ALL_REDUCE else ""
            good = min(gains) >= bar
            result.append(
                Claim(
                    f"{job}: Perf/$ of {arm}, over {other}, each seed; our bar: {bar:g}", paper,
                    ", ".join(f"{gain:.2f}" for gain in gains) + with_starts,
                    "reproduced" if good else "not reproduced", "" if good else why,
                )
            )  # fmt: skip
    return result
