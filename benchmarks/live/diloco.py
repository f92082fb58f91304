"""Bytes and time of `diloco` beside `doll`, `isp` and `essp`: a small CNN on EMNIST, as it comes and on a slow network.

Each run is a whole `doll up` of the example `emnist` with its small network (24 thousand numbers), with four workers
and a stream that is faster than they are, to the same number of samples. Bytes are what workers push and fetch, as the
parameter server counts them once a second. On the slow network each worker reaches Redis, which has weights and steps,
through a relay of `mbit_per_s` in each direction (0: no such runs); samples and grants do not pass it.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from doll.config import JobConfig, load
from doll.monitor.views.comparison import read_run
from doll.records.control import AnyRecord, ServerStatus
from doll.run.local.context import RunHook
from doll.run.local.up import run_up

from benchmarks.live import slow_network
from benchmarks.live.experiment import JOBS, Claim, Options, Report, mean_sd
from benchmarks.tables import Table

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.services import Services
    from matplotlib.figure import Figure

NAME: Final = "diloco"
PAPER: Final = "DiLoCo (arXiv 2311.08105), with the quorum and the grace of Decoupled DiLoCo (2604.21428)"
SETTINGS: Final = {"samples": "96000", "slow_samples": "16000", "mbit_per_s": "10", "grid": "no"}
SEEDS: Final = (0, 1, 2)
WORKERS: Final = 4
H: Final = 16
SHARE: Final = 0.1  # of doll's bytes, at most
LOSSES: Final = (1.2, 1.0, 0.8, 0.7, 0.6, 0.55)
_LEFT: Final = ("run", "step size")
_EVALUATIONS: Final = 5  # the loss at the end is their median


@dataclass(frozen=True)
class Setting:
    """A policy with its options.

    Attributes:
        optimizer: of the server (`doll`) or of each worker (the others), without the step size.
        lrs: of its runs.
        grid: that `lrs` were chosen from: the fewest bytes to most of the losses, and for `doll` also the lowest loss
            at the end.
        is_slow: it runs on the slow network as well, at the first of `lrs`.
    """

    label: str
    policy: str
    lrs: tuple[float, ...]
    grid: tuple[float, ...]
    optimizer: str = "name: sgd, momentum: 0.9"
    is_slow: bool = False


def _diloco(label: str, outer: str, lr: float, grid: tuple[float, ...], **options: Any) -> Setting:
    return Setting(f"diloco, {label}", f"{{name: diloco, local_batches: {H}, {outer}}}", (lr,), grid, **options)


# The steps of the workers of isp and essp are added, so theirs are smaller.
SETTINGS_OF_POLICIES: Final = (
    Setting("doll", "{name: doll, group_size: 4}", (0.05, 0.025), (0.0125, 0.025, 0.05, 0.1, 0.2), is_slow=True),
    Setting("isp, v = 0.7", "{name: isp, contributions: sum, significance: 0.7}", (0.0125,), (0.00625, 0.0125, 0.025)),
    Setting(
        "essp, s = 3", "{name: essp, contributions: sum, staleness: 3, under_way: 1}", (0.00625,),
        (0.003125, 0.00625, 0.0125, 0.025),
    ),
    _diloco("outer 0.7 and 0.9", "outer_lr: 0.7, outer_momentum: 0.9", 0.0125, (0.00625, 0.0125, 0.05)),
    _diloco("outer 0.7 and 0.5", "outer_lr: 0.7, outer_momentum: 0.5", 0.025, (0.025, 0.05, 0.1), is_slow=True),
    _diloco("outer 1 and 0", "outer_lr: 1.0, outer_momentum: 0.0", 0.025, (0.025, 0.05, 0.1)),
    _diloco("outer 0.7 and 0.9, Adam", "outer_lr: 0.7, outer_momentum: 0.9", 0.001, (0.001,), optimizer="name: adam"),
)  # fmt: skip


@dataclass
class Meter(RunHook):
    """Notes the bytes both ways that each status of the parameter server says.

    Attributes:
        network: of the workers.
        sent: versions, and the bytes when they were the newest.
    """

    network: RunHook
    sent: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def feed(self, record: AnyRecord) -> None:
        if isinstance(record, ServerStatus) and (counted := record.measures) is not None:
            pushed = counted.gradient_bytes + counted.row_request_bytes
            self.sent.append((record.version, pushed + counted.weights_bytes + counted.row_bytes))

    def services(self, role: str, stack: Stack) -> Services:
        return self.network.services(role, stack)


@dataclass(frozen=True)
class Run:
    """One run; lists have an entry for each version whose held-out loss was measured.

    Attributes:
        mbit_per_s: of each worker's link to Redis; None: without a limit.
        seconds: of learning, from the first update to the last.
        at_s: since the first update.
        sent_bytes: both ways, when the version was made.
    """

    label: str
    lr: float
    seed: int
    mbit_per_s: float | None
    seconds: float
    samples: int
    updates: int
    pushed_bytes: int
    fetched_bytes: int
    at_s: Sequence[float]
    sent_bytes: Sequence[float]
    losses: Sequence[float]

    @property
    def key(self) -> tuple[str, float]:
        return self.label, self.lr

    @property
    def last(self) -> float:
        """Median loss of the last evaluations."""
        return statistics.median(self.losses[-_EVALUATIONS:])

    def bytes_to(self, loss: float) -> float:
        return crossing(self.sent_bytes, self.losses, loss)

    def seconds_to(self, loss: float) -> float:
        return crossing(self.at_s, self.losses, loss)


def crossing(x: Sequence[float], losses: Sequence[float], target: float) -> float:
    """Where a loss first falls to `target`, by a line from the point before; infinite where it never does."""
    for at, loss in enumerate(losses):
        if loss <= target:
            if at == 0:
                return x[0]
            share = (losses[at - 1] - target) / (losses[at - 1] - loss)
            return x[at - 1] + share * (x[at] - x[at - 1])
    return math.inf


def run(folder: Path, options: Options) -> Report:
    images = options.file("emnist_bymerge/images-idx3-ubyte.gz", "the images of EMNIST byMerge in IDX format")
    labels = options.file("emnist_bymerge/labels-idx1-ubyte.gz", "their classes in IDX format")
    paths = [
        f"source.args.images_path={images}", f"source.args.labels_path={labels}", f"task.args.images_path={images}",
        f"task.args.labels_path={labels}",
    ]  # fmt: skip
    mbit_per_s = float(options.settings["mbit_per_s"])
    samples, slow_samples = (int(options.settings[key]) for key in ("samples", "slow_samples"))
    if options.quick:
        samples, slow_samples = 8_000, 4_000
    is_grid = options.settings["grid"] == "yes"
    runs: list[Run] = []
    for seed in options.seeds[:1] if options.quick else options.seeds:
        for setting in SETTINGS_OF_POLICIES:
            for lr in setting.grid if is_grid else setting.lrs:
                runs.append(measure(setting, lr, seed, job_of(setting, lr, seed, samples, paths), folder))
                print(curves_table(runs[-1:]).text(), file=sys.stderr, flush=True)
            if setting.is_slow and mbit_per_s > 0 and not is_grid:
                job = job_of(setting, setting.lrs[0], seed, slow_samples, paths, blobs="redis")
                runs.append(measure(setting, setting.lrs[0], seed, job, folder, mbit_per_s))
    return report_of(runs)


def job_of(
    setting: Setting, lr: float, seed: int, samples: int, paths: Sequence[str], blobs: str = "auto"
) -> JobConfig:
    return load(JOBS / "emnist" / "job.yaml", [
        f"training.policy={setting.policy}", f"training.optimizer={{{setting.optimizer}, lr: {lr!r}}}", f"seed={seed}",
        f"stop={{samples: {samples}}}", f"blobs.kind={blobs}", f"data.workers={WORKERS}", "task.args.small=true",
        "arrivals={process: asap}", "worker.max_pending_batches=64", "evaluation.every_s=0.25", *paths,
    ])  # fmt: skip


def measure(
    setting: Setting, lr: float, seed: int, job: JobConfig, folder: Path, mbit_per_s: float | None = None
) -> Run:
    """One run.

    Args:
        folder: its run folder is created in it.
        mbit_per_s: of each worker's link to Redis; None: without a limit.

    Raises:
        RuntimeError: it has failed, or its audit has.
    """
    # Without the label: Kafka takes a comma in a path for the end of it.
    parent = folder / f"{len(list(folder.iterdir()))}-{setting.label.partition(',')[0]}"
    with slow_network.network(mbit_per_s or 0.0) as network:
        meter = Meter(network)
        report = run_up(job, parent, hook=lambda *_: meter)
    if report["exit_code"]:
        raise RuntimeError(f"{setting.label}: {report['error'] or report['reason']}")
    (run_folder,) = (path for path in parent.iterdir() if path.is_dir())
    curve = read_run(setting.label, run_folder, usd_per_h=math.nan).losses["held-out"]
    total = report["measures"]["bytes"]
    sent = np.array(sorted([*meter.sent, (report["version"], total["both_ways"])]), dtype=float)
    return Run(
        setting.label, lr, seed, mbit_per_s, report["training_seconds"], report["samples"], report["updates"],
        total["pushed"], total["fetched"], curve.seconds.tolist(),
        np.interp(curve.versions, sent[:, 0], sent[:, 1]).tolist(), curve.loss.tolist(),
    )  # fmt: skip


def report_of(runs: Sequence[Run]) -> Report:
    free = [run for run in runs if run.mbit_per_s is None]
    slow = [run for run in runs if run.mbit_per_s is not None]
    seeds = sorted({run.seed for run in runs})
    tables = [curves_table(free), bytes_table(free), shares_table(free)]
    if slow:
        tables.append(slow_table(slow))
    grids = "; ".join(f"{each.label}: {', '.join(f'{lr:g}' for lr in each.grid)}" for each in SETTINGS_OF_POLICIES)
    return Report(
        "DiLoCo: bytes to a loss",
        tables,
        seeds,
        "± is the standard deviation over seeds" if len(seeds) > 1 else "one run, so the spread is not known",
        claims=[*claims(free), *slow_claims(slow)],
        notes=[
            f"{WORKERS} workers, batches of 32 images with random transforms, 24 thousand parameters (97 kB as they "
            f"are sent), H = {H}, K = 4; 2,000 held-out images, 47 classes. SGD with momentum 0.9 at the server (doll) "
            "or at each worker (the others).",
            "`outer 0.7 and 0.9`: rate and Nesterov momentum of the outer step, those of the paper and the defaults; "
            "`outer 1 and 0` is the mean of the workers' models.",
            f"Grids of step sizes, which `--set grid=yes` runs: {grids}. Without it the runs are those with the fewest "
            "bytes, and of doll also with the lowest last loss.",
            "Bytes are those of weights and contributions. On top come samples, 25 kB for each batch of any policy, "
            "and control records of some hundred bytes.",
        ],
        data={"runs": [asdict(run) for run in runs]},
    )


def _groups(runs: Sequence[Run]) -> dict[tuple[str, float], list[Run]]:
    """Runs by policy and step size, in the order of their first."""
    groups: dict[tuple[str, float], list[Run]] = {}
    for each in runs:
        groups.setdefault(each.key, []).append(each)
    return groups


def _cell(values: Sequence[float], digits: int) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "not"
    return mean_sd(known, digits) + (f" ({len(known)} of {len(values)})" if len(known) < len(values) else "")


def curves_table(runs: Sequence[Run]) -> Table:
    """A line for each policy and step size."""
    columns = (
        "run", "step size", "seconds", "samples/s", "updates", "pushed MB", "fetched MB", "last loss", "best loss",
    )  # fmt: skip
    table = Table("The same samples under each policy", columns, left=_LEFT)
    for (label, lr), group in _groups(runs).items():
        table.rows.append([
            label, f"{lr:g}", _cell([run.seconds for run in group], 1),
            _cell([run.samples / run.seconds for run in group], 0), _cell([run.updates for run in group], 0),
            _cell([run.pushed_bytes / 1e6 for run in group], 1), _cell([run.fetched_bytes / 1e6 for run in group], 1),
            _cell([run.last for run in group], 3), _cell([min(run.losses) for run in group], 3),
        ])  # fmt: skip
    return table


def bytes_table(runs: Sequence[Run]) -> Table:
    """A line for each policy and step size."""
    columns = ("run", "step size", *(f"to {loss:g}" for loss in LOSSES))
    table = Table("MB both ways to a held-out loss", columns, left=_LEFT)
    for (label, lr), group in _groups(runs).items():
        cells = (_cell([run.bytes_to(loss) / 1e6 for run in group], 1) for loss in LOSSES)
        table.rows.append([label, f"{lr:g}", *cells])
    return table


def shares(runs: Sequence[Run], loss: float) -> dict[tuple[str, float], list[float]]:
    """Bytes to `loss` by the fewest of `doll` at any of its step sizes, for each seed; infinite where it was not
    reached."""
    by_kind: dict[tuple[str, float], list[float]] = {}
    for each in runs:
        others = [run.bytes_to(loss) for run in runs if run.label == "doll" and run.seed == each.seed]
        if others and math.isfinite(fewest := min(others)):
            by_kind.setdefault(each.key, []).append(each.bytes_to(loss) / fewest)
    return by_kind


def shares_table(runs: Sequence[Run]) -> Table:
    """A line for each policy and step size."""
    columns = ("run", "step size", *(f"to {loss:g}" for loss in LOSSES))
    table = Table("Share of the fewest bytes of doll, at any of its step sizes, to the same loss", columns, left=_LEFT)
    by_loss = [shares(runs, loss) for loss in LOSSES]
    for label, lr in _groups(runs):
        cells = (_cell(shares_at.get((label, lr), []), 3) for shares_at in by_loss)
        table.rows.append([label, f"{lr:g}", *cells])
    return table


def slow_table(runs: Sequence[Run]) -> Table:
    """A line for each policy."""
    columns = ("run", "step size", "seconds", "samples/s", *(f"seconds to {loss:g}" for loss in LOSSES[:4]))
    title = f"The same samples, each worker on a link of {runs[0].mbit_per_s:g} Mbit/s"
    table = Table(title, columns, left=_LEFT)
    for (label, lr), group in _groups(runs).items():
        table.rows.append([
            label, f"{lr:g}", _cell([run.seconds for run in group], 1),
            _cell([run.samples / run.seconds for run in group], 0),
            *(_cell([run.seconds_to(loss) for run in group], 1) for loss in LOSSES[:4]),
        ])  # fmt: skip
    return table


def claims(runs: Sequence[Run]) -> list[Claim]:
    """Of runs without a limit: each kind of `diloco` at its best step size, where the largest share is the smallest."""
    result: list[Claim] = []
    by_loss = {loss: shares(runs, loss) for loss in LOSSES}
    best: dict[str, tuple[float, float, dict[float, float]]] = {}  # by label: the largest share, the step size, all
    for label, lr in _groups(runs):
        means = {loss: statistics.fmean(of[label, lr]) for loss, of in by_loss.items() if (label, lr) in of}
        if label.startswith("diloco") and means:
            largest = max(means.values())
            if label not in best or largest < best[label][0]:
                best[label] = (largest, lr, means)
    for label, (_, lr, means) in best.items():
        known = [share for share in means.values() if math.isfinite(share)]
        ours = f"{min(known):.3f} to {max(known):.3f} of doll's bytes, by loss" if known else "no loss is reached"
        claim = f"{label}, step size {lr:g}: at most a tenth of doll's bytes to the same loss"
        paper = f"H = {H}: a bar of this project"
        if above := [f"{loss:g}" for loss, share in means.items() if not share <= SHARE]:
            why = f"more than a tenth, or not reached by all seeds, to {', '.join(above)}"
            result.append(Claim(claim, paper, ours, "not reproduced", why))
        else:
            result.append(Claim(claim, paper, ours, "reproduced"))
    return result


def slow_claims(runs: Sequence[Run]) -> list[Claim]:
    """Of runs on a slow network."""
    by_policy = {label.partition(",")[0]: group for (label, _), group in _groups(runs).items()}
    if not {"doll", "diloco"} <= by_policy.keys():
        return []
    rates = {
        name: statistics.fmean(run.samples / run.seconds for run in by_policy[name]) for name in ("doll", "diloco")
    }
    ours = f"{rates['diloco']:,.0f} samples/s, doll {rates['doll']:,.0f}"
    claim, paper = "on a slow network diloco learns faster than doll", "poorly connected machines (section 1)"
    if rates["diloco"] > rates["doll"]:
        return [Claim(claim, paper, ours, "reproduced")]
    return [Claim(claim, paper, ours, "not reproduced", "the link does not bound doll here")]


def draw(figure: Figure, data: dict[str, Any]) -> None:
    from doll_lab.figures import decorate

    runs = [Run(**run) for run in data["runs"]]
    seed = min(run.seed for run in runs)
    limit = next((run.mbit_per_s for run in runs if run.mbit_per_s is not None), None)
    left, right = figure.subplots(1, 2)
    for number, setting in enumerate(SETTINGS_OF_POLICIES):
        for each in runs:
            if each.key != (setting.label, setting.lrs[0]) or each.seed != seed:
                continue
            style = {"linewidth": 1, "color": f"C{number}", "label": f"{each.label}, {each.lr:g}"}
            if each.mbit_per_s is None:
                left.plot([size / 1e6 for size in each.sent_bytes], each.losses, **style)
            if each.mbit_per_s == limit:
                right.plot(each.at_s, each.losses, **style)
    left.set_xscale("log")
    network = f"workers on {limit:g} Mbit/s" if limit else "a network without a limit"
    decorate(left, "bytes", "MB both ways", "held-out loss")
    decorate(right, network, "seconds since the first update", "held-out loss")
    left.legend(fontsize=6, frameon=False)
