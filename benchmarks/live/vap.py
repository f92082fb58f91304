"""VAP on real jobs: what the view of each applied step missed, how long workers were blocked, and that no bound is asp.

Each row is one `doll up` of the digits for a fixed time, with an event log. The log is walked after the run: for each
applied step the steps of all other workers are added up that came between the version that its worker had read and the
version that it made. No number of this sum may be above v_t = v_0 / sqrt(t), t being the number of the update. The
policy's own account is not used.

The run without a bound is replayed as `asp` from the same log: each version must be the same to the bit.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from doll.config import JobConfig, load
from doll.errors import IllegalEventError
from doll.model.flat_model import build
from doll.monitor.views.display import Display
from doll.ps.engine.events import ApplyUpdate, GradientFetched
from doll.ps.event_log import read_log, replay
from doll.ps.model.updater import ModelParts, make_parts
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.start import make_engine
from doll.run.folder import RunFolder
from doll.run.local.up import run_up
from doll.storage.blobs import blob_info, scope_of
from doll.storage.contributions import decode_contribution
from doll.task.base import load_task

from benchmarks.live.experiment import JOBS, Claim, Options, Report
from benchmarks.live.paced import OneSlowWorker
from benchmarks.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "vap"
PAPER = "Dai et al. 2015 (ESSP), section 3.2: condition (1) of VAP"
SETTINGS = {
    "bounds": "0.02,0.07,0.25,inf",  # v_0; the largest number of a step is 0.002 to 0.008
    "adversary_bounds": "1",
    "seconds": "8",  # of learning, per run
    "batch_s": "0.1",
    "slowness": "10",  # of worker 0
}

ADVERSARY_STEP: Final = 0.02
_ROUNDING: Final = 1e-9

Vector = npt.NDArray[np.float64]


class Missed(NamedTuple):
    """What the view of one applied step missed."""

    update: int
    worker: int
    largest: float  # of all numbers, without its sign
    updates_missed: int  # of other workers


def missed_views(config: JobConfig, log: Path) -> Iterator[Missed]:
    """What the view of each step missed that the server of an event log applied, in the order of the updates.

    The model must be dense: rows of tables are not looked at.

    Raises:
        RecordError: not an event log of this build.
    """
    start, entries = read_log(log)
    parts = make_parts(config.training, build(config, load_task(config)))
    engine, updater = make_engine(config, start, parts.load), parts.updater
    scope, count = scope_of(config.job, engine.start.run_id), updater.num_parameters
    received: dict[int, Vector] = {}  # steps that are not applied, by set
    applied: list[tuple[int, int, Vector]] = []  # (version that it made, worker, step)
    for entry in entries:
        if isinstance(entry.event, GradientFetched):
            version = blob_info(entry.gradient).version
            step = decode_contribution(entry.gradient, count, job=scope, version=version, numel=updater.weights.size)
            received[entry.event.grant_id] = step.values[:count].astype(np.float64)
        for action in engine.handle(entry.event, entry.now):
            if not isinstance(action, ApplyUpdate):
                continue
            for item in action.sets:
                worker = item.push.worker
                others = [
                    step for made, other, step in applied
                    if item.push.version < made < action.version and other != worker
                ]  # fmt: skip
                largest = float(np.abs(np.sum(others, axis=0)).max()) if others else 0.0
                yield Missed(action.version, worker, largest, len(others))
                if (number := item.grant_id) in received:  # a batch without a usable sample has no step
                    applied.append((action.version, worker, received.pop(number)))


def digests(config: JobConfig, log: Path) -> list[str]:
    """A digest of the weights of each version that the server of an event log made."""
    made: list[str] = []

    def note(version: int, parts: ModelParts) -> None:
        made.append(hashlib.sha256(parts.updater.weights.tobytes()).hexdigest())

    for _ in replay(config, log, on_update=note):
        pass
    return made


def as_asp(config: JobConfig) -> JobConfig:
    """The same job under `asp` with steps."""
    training = config.training.model_copy(update={"policy": AspPolicyConfig(contribution="step", contributions="sum")})
    return config.model_copy(update={"training": training})


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        shares: of v_t, what the view of each step missed.
        old_views: steps whose views missed at least one step.
        blocked: share of the workers' time.
        voided: batches that were computed again.
        is_asp: the versions of a replay as `asp` are the same; None: not tried.
    """

    setting: str
    bound: float
    seed: int
    shares: list[float]
    old_views: int
    blocked: float
    voided: int
    accuracy: float | None
    is_asp: bool | None

    @property
    def updates(self) -> int:
        return len(self.shares)

    @property
    def beyond(self) -> int:
        """Steps whose views missed more than v_t."""
        return sum(share > 1 + _ROUNDING for share in self.shares)

    @property
    def worst(self) -> float:
        return max(self.shares, default=math.nan)


def run_one(folder: Path, setting: str, bound: float, seed: int, options: Options) -> Row:
    """One run and the walk over its event log."""
    slowness = float(options.settings["slowness"]) if "slow" in setting else 1.0
    batch_s = float(options.settings["batch_s"])
    task = {"class": "benchmarks.live.paced:PacedDigits", "args": {"batch_s": batch_s, "hidden": [64]}}
    if "adversary" in setting:
        task["class"] = "benchmarks.live.paced:SameDirection"
        task["args"] |= {"step": ADVERSARY_STEP}  # type: ignore[operator]
    seconds = 4.0 if options.quick else float(options.settings["seconds"])
    config = load(
        JOBS / "digits" / "job.yaml",
        [
            f"seed={seed}", f"training.policy={{name: vap, contributions: sum, value_bound: {_yaml(bound)}}}",
            "training.optimizer={name: sgd, lr: 0.02}", "checkpoint.event_log=true", f"stop={{seconds: {seconds}}}",
            # A quarter more than the workers could take without waiting.
            f"arrivals={{process: poisson, rate_per_s: {1.25 * 32 / batch_s:.0f}}}", "evaluation.every_s=5",
        ],
    )  # fmt: skip
    config = config.model_copy(update={"task": config.task.model_validate(task)})
    runs: list[RunFolder] = []

    def hook(run: RunFolder, display: Display) -> OneSlowWorker:
        runs.append(run)
        return OneSlowWorker(slowness)

    report = run_up(config, folder, hook=hook)
    if report["exit_code"]:
        raise subprocess.CalledProcessError(report["exit_code"], ["doll", "up", "digits", setting, str(bound)])
    (log,) = sorted((runs[0].path / "events").glob("*.log"))
    config = load(runs[0].job)
    missed = list(missed_views(config, log))
    return Row(
        setting, bound, seed, [view.largest / (bound / math.sqrt(view.update)) for view in missed],
        sum(view.updates_missed > 0 for view in missed), report["measures"]["blocked_share"],
        report["measures"]["void_batches"], report["accuracy"], is_asp(config, log) if math.isinf(bound) else None,
    )  # fmt: skip


def is_asp(config: JobConfig, log: Path) -> bool:
    """Whether `asp` with steps makes the same versions from the events of this log, to the bit."""
    try:
        return digests(config, log) == digests(as_asp(config), log)
    except IllegalEventError:  # an answer to a grant that asp has not made
        return False


def _yaml(bound: float) -> str:
    return ".inf" if math.isinf(bound) else repr(bound)


def table(rows: Sequence[Row]) -> Table:
    """A line for each run."""
    result = Table(
        "Each line is one run",
        ("setting", "v_0", "steps applied", "of older views", "beyond v_t", "most missed, of v_t", "blocked",
         "void batches", "accuracy"),
        left=("setting",),
    )  # fmt: skip
    for row in rows:
        is_bounded = math.isfinite(row.bound)
        result.rows.append(
            [
                row.setting, f"{row.bound:g}", str(row.updates), str(row.old_views),
                str(row.beyond) if is_bounded else "–", f"{row.worst:.3f}" if is_bounded else "–",
                f"{100 * row.blocked:.1f} %", f"{row.voided} ({100 * row.voided / max(row.updates, 1):.1f} %)",
                "–" if row.accuracy is None or "adversary" in row.setting else f"{row.accuracy:.3f}",
            ]
        )  # fmt: skip
    return result


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What the paper says of VAP, of these runs."""
    finite = [row for row in rows if math.isfinite(row.bound)]
    beyond, steps = sum(row.beyond for row in finite), sum(row.updates for row in finite)
    result = [
        Claim("no view misses more than v_t", "always", f"{beyond} of {steps} beyond it",
              *(("reproduced", "") if not beyond else ("not reproduced", "see the column"))),
    ]  # fmt: skip
    for setting, seed in dict.fromkeys((row.setting, row.seed) for row in rows):
        mine = sorted((row for row in rows if (row.setting, row.seed) == (setting, seed)), key=lambda row: row.bound)
        if len(mine) < 2:
            continue
        falls = all(more.blocked > less.blocked for more, less in pairwise(mine))
        shares = ", ".join(f"{100 * row.blocked:.1f} %" for row in mine)
        bounds = ", ".join(f"{row.bound:g}" for row in mine)
        result.append(
            Claim(f"{setting}, seed {seed}: workers wait less for a larger v_0 ({bounds})", "yes", shares,
                  *(("reproduced", "") if falls else ("not reproduced", "the shares are not in this order")))
        )  # fmt: skip
    tried = [row for row in rows if row.is_asp is not None]
    same = sum(bool(row.is_asp) for row in tried)
    result.append(
        Claim("without a bound it is asp", "by definition",
              f"{same} of {len(tried)} runs ({sum(row.updates for row in tried)} versions) equal to the bit",
              *(("reproduced", "") if tried and same == len(tried) else ("not reproduced", "a replay as asp differs")))
    )  # fmt: skip
    return result


def run(folder: Path, options: Options) -> Report:
    bounds, adversary = (
        sorted(float(word) for word in options.settings[name].split(",")) for name in ("bounds", "adversary_bounds")
    )
    slowness = f"one worker {options.settings['slowness']} times slower"
    settings = {
        "equal speeds": bounds, slowness: bounds, f"adversary, {slowness}": adversary,
    }  # fmt: skip
    rows = []
    for seed in options.seeds:
        for setting, mine in settings.items():
            for bound in mine:
                rows.append(run_one(folder, setting, bound, seed, options))
                print(table(rows).text(), flush=True)
    seconds, batch_s = options.settings["seconds"], options.settings["batch_s"]
    notes = [
        f"4 workers for {seconds} s, digits by an MLP with one hidden layer of 64, SGD at 0.02, batches of 32. A batch "
        f"takes {batch_s} s in addition to what the machine needs for it: a pause, so that workers do not compete for "
        "its cores.",
        f"The adversary's steps move all numbers by {ADVERSARY_STEP:g} in the same direction.",
        "Blocked: share of the workers' time for which they had a complete batch, were idle and had no grant.",
    ]
    count = len(options.seeds)
    spread = "each line is one run, and the runs of a setting differ in v_0 only" if count == 1 else "a line per seed"
    data = {"rows": [asdict(row) | {"bound": str(row.bound)} for row in rows]}
    return Report("VAP: what a view misses, live", [table(rows)], options.seeds, spread, claims(rows), notes, data)


def draw(figure: Figure, data: dict[str, Any]) -> None:
    """What views missed under the smallest v_0, and blocked shares."""
    from doll_lab.figures import decorate

    rows = [Row(**(row | {"bound": float(row["bound"])})) for row in data["rows"]]
    missed, blocked = figure.subplots(1, 2)
    for setting in dict.fromkeys(row.setting for row in rows):
        mine = sorted((row for row in rows if row.setting == setting), key=lambda row: row.bound)
        shares = np.sort([share for row in mine if math.isfinite(row.bound) for share in row.shares])
        more = 1 - np.arange(1, len(shares) + 1) / len(shares)
        missed.plot(shares, more, linewidth=1.3, drawstyle="steps-post", label=setting)
        blocked.plot([f"{row.bound:g}" for row in mine], [100 * row.blocked for row in mine], "o-", linewidth=1.3)
    missed.axvline(1.0, color="black", linewidth=1, linestyle=":")
    decorate(missed, "all finite v_0", "what a view misses, of v_t", "share of views that miss more")
    missed.legend(fontsize=8, frameon=False)
    decorate(blocked, "workers blocked", "v_0", "% of their time")
    blocked.set_ylim(bottom=0)
