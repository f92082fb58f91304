"""HetPipe's comparison: virtual workers in waves (WSP) and all-reduce (DDP over gloo) on the same 16 unequal GPUs.

A GPU is a process that takes a stated time for its part of a minibatch (`benchmarks.live.paced`), in the ratios of the
paper's four kinds: V, R, G, Q. So 16 of them fit on this machine's cores, and what differs is who waits for whom.
Virtual workers are those of the paper's Table 3; their stages are cut by DOLL's partitioner for the speeds of their
GPUs. The all-reduce has the whole model on each GPU, and the slowest of them sets its pace.

Transfers take a stated time as well, in the ratio to a minibatch's that they have on the links of
`benchmarks.paper.hetpipe_links`: activations and gradients between stages, the all-reduce behind the gradients, and,
where parameters are not on the nodes that compute them (NP), pushes and pulls.

All learn the same model from the same kind of stream with the same minibatch, for the same time, on one broker. Speeds
are constant, or drift: each GPU's by itself.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from doll.config import JobConfig, parse
from doll.local.kafka_broker import LocalKafka
from doll.pipeline.profiling.layers import layers_of
from doll.pipeline.profiling.profile import LayerProfile, Profile
from doll.pipeline.runtime.messages import StageTask
from doll.run.local.up import run_up
from doll.task.base import load_task

from benchmarks.live import paced_allreduce, slow_network
from benchmarks.live.diloco import crossing
from benchmarks.live.experiment import Claim, Options, Report, Verdict, mean_sd
from benchmarks.live.paced import FORWARD_SHARE, PacedBlock
from benchmarks.live.paced_allreduce import Round
from benchmarks.paper.harness import near
from benchmarks.paper.hetpipe_models import GPUS
from benchmarks.tables import Table
from doll_lab.pipelines.measured import read_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME: Final = "hetpipe"
PAPER: Final = "Park et al. 2020 (HetPipe), Figs. 4 to 6 and Table 4"
SETTINGS: Final = {
    "seconds": "50",  # of learning, per run
    "block_s": "0.015",  # of a minibatch in one of 24 blocks on a V
    "in_flight": "5",  # N_m, of ED-local with VGG-19 in Table 4
    # A minibatch takes a V 0.36 s here, 0.43 s with the paper's VGG-19 and 0.5 s with its ResNet-152.
    "link_s": "0.008",  # of 17 MB of activations between two of the four nodes at 1.8 GB/s
    "ring_s": "1.07",  # of the all-reduce of VGG-19: a step of 16 GPUs is then as long as at the paper's 339 images/s
    "ring_12_s": "0.46",  # of ResNet-152: a step of 12 GPUs then takes as long as at 415 images/s
    "np_mbit_per_s": "18",  # of each worker's pushes, and of its pulls, with NP: 0.19 s, as 411 MB at 1.8 GB/s
    "lr": "0.005",  # a step on each minibatch; the all-reduce's mean of 16 gets 16 times that
    "own_lr": "0.01",  # a larger step that suits virtual workers at D = 0; at 0.02 the loss goes up and down
    "own_all_reduce_lr": "0.3",  # of the mean: the all-reduce is there first, of 0.05, 0.1, 0.2, 0.3, 0.4, 0.6 and 0.8
    "loss": "1.2",  # held out, to be reached
    "drift": "0.3",  # sigma of the lognormal factors of drifting speeds
    "drift_every_s": "2",
}
STAGES: Final = 4
BLOCKS: Final = 24
BATCH: Final = 32
ED, NP, WITHOUT_G = ("VRGQ",) * 4, ("VVVV", "RRRR", "GGGG", "QQQQ"), ("VRQ",) * 4
TOLERANCE: Final = 0.2  # of a ratio that the paper states
_SMOOTHED: Final = 5  # evaluations
_WARM_S: Final = 5.0  # at the beginning of a run, which rates and shares leave out
_GRID_S: Final = 0.002
_JOB: Final = f"""
job: hetpipe
task:
  class: benchmarks.live.paced:PacedBlocks
  args: {{blocks: {BLOCKS}, width: 64, batch_size: {BATCH}, block_s: 0}}
data: {{workers: 4, batch_size: {BATCH}}}
source: {{kind: python, of: examples.digits.task:samples}}
training:
  policy: {{name: wsp}}
  optimizer: {{name: sgd, lr: 0.01}}
checkpoint: {{every_s: 20, every_updates: 1000000}}
evaluation: {{every_s: 0.4, max_samples: 1000}}
"""


class System(NamedTuple):
    """What learns.

    Attributes:
        label: for the all-reduce its GPUs; for virtual workers an allocation of the paper's Table 3.
        gpus: of each virtual worker; the all-reduce has a process for each letter.
        distance: D; None: all-reduce.
        is_drifting: whether speeds drift.
        has_own_lr: it takes the steps that suit it, and not those that all take.
    """

    label: str
    gpus: tuple[str, ...]
    distance: int | None = None
    is_drifting: bool = False
    has_own_lr: bool = False

    @property
    def num_gpus(self) -> int:
        return sum(map(len, self.gpus))


ON_16, ON_12, OWN_STEP = "all-reduce, 16 GPUs", "all-reduce, 12 GPUs", "all-reduce, 16 GPUs, own step"
ED_0, ED_4, NP_0, NP_4 = "ED, D = 0", "ED, D = 4", "NP, D = 0", "NP, D = 4"
ED_OWN_STEP = "ED, D = 0, own step"
SYSTEMS: Final = (
    System(ON_16, ED), System(OWN_STEP, ED, has_own_lr=True), System(ON_12, WITHOUT_G), System(ED_0, ED, 0),
    System(ED_OWN_STEP, ED, 0, has_own_lr=True), System(ED_4, ED, 4), System(NP_0, NP, 0), System(NP_4, NP, 4),
    System(ON_16, ED, is_drifting=True), System(ED_0, ED, 0, is_drifting=True), System(ED_4, ED, 4, is_drifting=True),
)  # fmt: skip


class Run(NamedTuple):
    """One run.

    Attributes:
        samples_per_s: behind the first seconds, as the shares.
        busy_share: of the GPUs' time, that of their tasks.
        waiting_share: of the virtual workers' time, that in which a minibatch had room, but was not admitted, and the
            first stage had nothing else to do; of the all-reduce's GPUs, that in which they do not compute.
        idle_share: of the virtual workers' time, that of `waiting_share` in which no stage computed.
        curve: (seconds, samples, held-out loss), from the first task on.
        oldest: the most minibatches of another virtual worker that the weights of a minibatch lacked, of those before
            it: s_global is the bound.
        missing, twice: offsets, by the audit.
    """

    label: str
    distance: int | None
    is_drifting: bool
    seed: int
    samples_per_s: float
    busy_share: float
    waiting_share: float
    idle_share: float
    curve: list[tuple[float, int, float]]
    oldest: int | None = None
    missing: int = 0
    twice: int = 0

    @property
    def losses(self) -> list[float]:
        """Of the curve, each the median of it and those before it."""
        plain = [loss for *_, loss in self.curve]
        return [statistics.median(plain[max(0, at - _SMOOTHED + 1) : at + 1]) for at in range(len(plain))]

    def seconds_to(self, loss: float) -> float:
        """Infinite where it is not reached."""
        return crossing([at_s for at_s, _, _ in self.curve], self.losses, loss)

    def samples_to(self, loss: float) -> float:
        return crossing([float(samples) for _, samples, _ in self.curve], self.losses, loss)


def s_global(in_flight: int, distance: int) -> int:
    """The paper's bound: updates of another virtual worker that a minibatch may lack, of those before it."""
    return (distance + 1) * in_flight + in_flight - 2


def slowdown(kind: str) -> float:
    """Of a GPU, by its letter: how many times as long as a V it takes."""
    return GPUS["V"].speed / GPUS[kind].speed


def changes_of(system: System, options: Options, seed: int) -> list[str]:
    """Of the job, for a run of this system."""
    asked = options.settings
    block_s = float(asked["block_s"])
    # Half as much again as a virtual worker of the fastest GPUs takes.
    rate_per_s = 1.5 * BATCH * STAGES / (BLOCKS * block_s)
    changes = [
        f"seed={seed}", f"task.args.block_s={block_s!r}", f"stop={{seconds: {seconds_of(options)!r}}}",
        f"arrivals={{process: poisson, rate_per_s: {rate_per_s:.0f}}}",
        f"training.optimizer.lr={asked['own_lr' if system.has_own_lr else 'lr']}",
        f"task.args.link_s={asked['link_s']}",
    ]  # fmt: skip
    if system.is_drifting:
        changes += [f"task.args.drift={asked['drift']}", f"task.args.drift_every_s={asked['drift_every_s']}"]
    if system.distance is not None:
        wave = f"wave_batches: {asked['in_flight']}, clock_distance: {system.distance}"
        policy = f"{{name: wsp, contributions: sum, {wave}}}"
        changes += [f"training.policy={policy}", *slow_network.CHANGES]
    return changes


def pipeline_of(system: System, profile: Path) -> str:
    """The change of the job that has this system's virtual workers."""
    devices = [[{"slowdown": slowdown(kind)} for kind in worker] for worker in system.gpus]
    return f"worker.pipeline={json.dumps({'stages': STAGES, 'devices': devices, 'profile': str(profile)})}"


def seconds_of(options: Options) -> float:
    return 6.0 if options.quick else float(options.settings["seconds"])


def profile_of(job: JobConfig) -> Profile:
    """What the layers of the job's model take on a V: the blocks the stated time, the others none."""
    task = load_task(job)
    block_s = float(job.task.args["block_s"])
    layers = []
    for layer in layers_of(task, task.build_model()):
        layer_s = block_s if isinstance(layer.module, PacedBlock) else 0.0
        parameters = sum(parameter.numel() for parameter in layer.module.parameters())
        output_bytes = 4 * BATCH * 64
        layers.append(
            LayerProfile(layer.name, FORWARD_SHARE * layer_s, (1 - FORWARD_SHARE) * layer_s, output_bytes, output_bytes,
                         4 * parameters)
        )  # fmt: skip
    return Profile("blocks", BATCH, "V", tuple(layers))


class Shares(NamedTuple):
    """Of a virtual worker's time, as of `Run`."""

    busy: float
    waiting: float
    idle: float


def shares_of(tasks: Sequence[StageTask], stages: int, in_flight: int, warm_s: float = _WARM_S) -> Shares:
    """From the tasks of one virtual worker, between `warm_s` after its first and its last."""
    begun_s, ended_s = min(task.start_s for task in tasks), max(task.end_s for task in tasks)
    count = max(1, round((ended_s - begun_s) / _GRID_S))
    computing = np.zeros((stages, count), bool)
    under_way = np.zeros(count, int)
    for task in tasks:
        first, stop = (round((at_s - begun_s) / _GRID_S) for at_s in (task.start_s, task.end_s))
        computing[task.stage, first:stop] = True
        if task.stage == 0:  # a minibatch is under way from its first task here to the end of its last one
            under_way[first if task.kind == "F" else stop :] += 1 if task.kind == "F" else -1
    waiting = (under_way < in_flight) & ~computing[0]
    idle = waiting & ~computing.any(axis=0)
    steady = slice(min(round(warm_s / _GRID_S), count - 1), None)
    return Shares(*(float(part[..., steady].mean()) for part in (computing, waiting, idle)))


def rate_of(progress: Sequence[tuple[float, int]], warm_s: float = _WARM_S) -> float:
    """Samples per second from `warm_s` on.

    Args:
        progress: (seconds, samples until then).
    """
    (first_s, first), (last_s, last) = next((at for at in progress if at[0] >= warm_s), progress[0]), progress[-1]
    return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def read_run(system: System, seed: int, in_flight: int, report: dict[str, Any], clock_offset_s: float) -> Run:
    """A run of virtual workers from its report.json and the files that it names.

    Args:
        clock_offset_s: what is added to a time of the stages for one of the tables.
    """
    files, audit = report["files"], report["audit"]
    folder = Path(files["updates"]).parent / "pipeline"
    tasks = [read_tasks(folder / f"worker-{worker}.jsonl") for worker in range(len(system.gpus))]
    begun_s = clock_offset_s + min(task.start_s for own in tasks for task in own)
    with Path(files["updates"]).open(encoding="utf-8") as rows:
        updates = list(csv.DictReader(rows))
    progress = [(float(row["time_s"]) - begun_s, int(row["samples_total"])) for row in updates]
    learned = {0: 0} | {int(row["version"]): int(row["samples_total"]) for row in updates}
    with Path(files["evaluations"]).open(encoding="utf-8") as rows:
        curve = [
            (float(row["time_s"]) - begun_s, learned[int(row["version"])], float(row["loss"]))
            for row in csv.DictReader(rows)
            if row["loss"] and float(row["time_s"]) > begun_s
        ]
    shares = [shares_of(own, STAGES, in_flight) for own in tasks]
    busy, waiting, idle = (statistics.fmean(each) for each in zip(*shares, strict=True))
    oldest = -min(map(int, report["measures"]["staleness"]["histogram"])) - 1
    return Run(
        system.label, system.distance, system.is_drifting, seed, rate_of(progress), busy, waiting, idle, curve, oldest,
        audit["missing"], audit["duplicate"],
    )  # fmt: skip


def learn(system: System, seed: int, folder: Path, options: Options, kafka_address: str) -> Run:
    """One run."""
    changes, asked = changes_of(system, options, seed), options.settings
    if system.distance is None:
        lr = float(asked["own_all_reduce_lr"]) if system.has_own_lr else system.num_gpus * float(asked["lr"])
        slowdowns = [slowdown(kind) for kind in "".join(system.gpus)]
        ring_s = float(asked["ring_12_s" if system.label == ON_12 else "ring_s"])
        got = paced_allreduce.measure(Round(_JOB, changes, slowdowns, lr, seconds_of(options), ring_s))
        curve = [(at_s, samples, loss) for at_s, samples, loss in got["curve"]]
        rate = rate_of([(at_s, samples) for at_s, samples, _ in curve])
        busy = got["busy_share"]
        return Run(system.label, None, system.is_drifting, seed, rate, busy, 1 - busy, 1 - busy, curve)
    name = f"hetpipe-{len(list(folder.iterdir()))}"
    own = folder / name
    own.mkdir()
    profile = own / "profile.json"
    profile.write_bytes(profile_of(parse(_JOB, changes)).to_json())
    changes += [pipeline_of(system, profile), f"job={name}", f"kafka.address={kafka_address}"]
    mbit_per_s = float(asked["np_mbit_per_s"]) if system.gpus == NP else 0.0
    with slow_network.network(mbit_per_s) as network:
        report = run_up(parse(_JOB, changes), own, hook=lambda *_: network)
    return read_run(system, seed, int(asked["in_flight"]), report, time.time() - time.monotonic())


def of(runs: Sequence[Run], label: str, *, is_drifting: bool = False) -> list[Run]:
    """The runs of one system, by seed."""
    return [run for run in runs if (run.label, run.is_drifting) == (label, is_drifting)]


def table(runs: Sequence[Run], loss: float, in_flight: int) -> Table:
    """A line for each system; means over its seeds."""
    columns = (
        "method", "speeds", "samples/s", "GPUs compute", "waiting", "idle", f"s to {loss:g}", f"samples to {loss:g}",
        "last loss", "oldest weights", "missing", "twice",
    )  # fmt: skip
    result = Table("Each system for the same time", columns, left=columns[:2])
    for label, is_drifting in dict.fromkeys((run.label, run.is_drifting) for run in runs):
        mine = of(runs, label, is_drifting=is_drifting)
        oldest = [run.oldest for run in mine if run.oldest is not None]
        distance = mine[0].distance
        of_bound = "" if distance is None else f"{max(oldest)} of {s_global(in_flight, distance)}"
        result.rows.append(
            [
                label, "drifting" if is_drifting else "constant", mean_sd([run.samples_per_s for run in mine], 0),
                *(f"{100 * statistics.fmean(getattr(run, name) for run in mine):.1f} %"
                  for name in ("busy_share", "waiting_share", "idle_share")),
                mean_sd([run.seconds_to(loss) for run in mine], 1), mean_sd([run.samples_to(loss) for run in mine], 0),
                mean_sd([run.losses[-1] for run in mine], 3), of_bound,
                *(str(sum(getattr(run, name) for run in mine)) if of_bound else "" for name in ("missing", "twice")),
            ]
        )  # fmt: skip
    return result


def claims(runs: Sequence[Run], loss: float, in_flight: int) -> list[Claim]:
    """What the paper says, of means over the seeds."""

    def mean(what: str, label: str, *, is_drifting: bool = False) -> float:
        mine = of(runs, label, is_drifting=is_drifting)
        values = [run.seconds_to(loss) if what == "s" else getattr(run, what) for run in mine]
        return statistics.fmean(values)

    def ratio(what: str, label: str, other: str, *, is_drifting: bool = False) -> float:
        return mean(what, label, is_drifting=is_drifting) / mean(what, other, is_drifting=is_drifting)

    rate, unknown = "samples_per_s", "how speeds drift in the paper is not known"
    pipeline = "the pipeline's own waits: see the share of the time in which GPUs compute"
    stale = "older weights cost samples (the table), and the throughput does not make up for as many as in the paper"
    gains = {label: ratio(rate, label, label.replace("4", "0")) for label in (ED_4, NP_4)}
    pipelines = [(run, run.distance) for run in runs if run.distance is not None]
    is_bounded = all((run.oldest or 0) <= s_global(in_flight, distance) for run, distance in pipelines)
    oldest = {
        distance: max(run.oldest or 0 for run, other in pipelines if other == distance) for _, distance in pipelines
    }
    audited = sum(run.missing + run.twice for run, _ in pipelines)
    to_loss = f"time to loss {loss:g}"
    return [
        _ratio("ED, D = 0: samples/s, of all-reduce on the 12 GPUs without G", "Fig. 4, ResNet-152, ED-local", 1.4,
               ratio(rate, ED_0, ON_12), pipeline),
        _ratio("ED, D = 0: samples/s, of all-reduce on 16 GPUs", "Fig. 4, VGG-19, ED-local", 1.8,
               ratio(rate, ED_0, ON_16), pipeline),
        _claim("NP, D = 0: samples/s, of ED", "Fig. 4: below 1", ratio(rate, NP_0, ED_0), ratio(rate, NP_0, ED_0) < 1,
               "QQQQ is no slower than VRGQ"),
        _ratio(f"ED, D = 0: {to_loss}, of all-reduce on the 12 GPUs without G", "Fig. 5, ResNet-152", 0.61,
               ratio("s", ED_0, ON_12), stale),
        _ratio(f"ED, D = 0: {to_loss}, of all-reduce on 16 GPUs", "Fig. 6, VGG-19", 0.71, ratio("s", ED_0, ON_16),
               stale),
        _claim(f"ED, D = 0: {to_loss}, of all-reduce on 16 GPUs, each with the step that suits it", "our bar: below 1",
               ratio("s", ED_OWN_STEP, OWN_STEP), ratio("s", ED_OWN_STEP, OWN_STEP) < 1,
               "so early in learning the all-reduce takes larger steps: its gradients are of the newest weights"),
        _ratio(f"drifting, ED: {to_loss} at D = 4, of D = 0", "Fig. 6, VGG-19", 0.72,
               ratio("s", ED_4, ED_0, is_drifting=True), stale),
        _ratio(f"drifting: {to_loss} of ED at D = 4, of all-reduce on 16 GPUs", "Fig. 6, VGG-19", 0.51,
               ratio("s", ED_4, ON_16, is_drifting=True), stale),
        _at_most("drifting, ED: waiting at D = 4, of D = 0", 0.62,
                 ratio("waiting_share", ED_4, ED_0, is_drifting=True), unknown),
        _at_most("drifting, ED, D = 4: idle, of waiting", 0.18,
                 mean("idle_share", ED_4, is_drifting=True) / mean("waiting_share", ED_4, is_drifting=True), unknown),
        _claim("samples/s at D = 4 of D = 0: NP's gain, of ED's", "section 8.4: above 1", gains[NP_4] / gains[ED_4],
               gains[NP_4] > gains[ED_4],
               "a virtual worker that is permanently slower sets the pace of all, whatever D"),
        Claim("no weights lack more than s_global minibatches of another virtual worker", "section 5.2",
              ", ".join(f"D = {distance}: {most} of {s_global(in_flight, distance)}"
                        for distance, most in sorted(oldest.items())),
              *_verdict(is_bounded, "see the column")),
        Claim("the audit of each run of virtual workers: offsets missing and twice", "DOLL's: none", str(audited),
              *_verdict(audited == 0, "see the columns")),
    ]  # fmt: skip


def _verdict(is_met: bool, why: str) -> tuple[Verdict, str]:
    return ("reproduced", "") if is_met else ("not reproduced", why)


def _claim(claim: str, paper: str, ours: float, is_met: bool, why: str) -> Claim:
    is_known = math.isfinite(ours) and ours > 0  # else a loss was not reached
    return Claim(claim, paper, f"{ours:.2f}" if is_known else "not reached", *_verdict(is_known and is_met, why))


def _ratio(claim: str, where: str, paper: float, ours: float, why: str) -> Claim:
    return _claim(claim, f"{where}: {paper:g} ± {100 * TOLERANCE:g} %", ours, near(ours, paper, TOLERANCE), why)


def _at_most(claim: str, paper: float, ours: float, why: str) -> Claim:
    share = f"section 8.4: {paper:g}; at most {100 * TOLERANCE:g} % more"
    return Claim(claim, share, f"{ours:.2f}", *_verdict(ours <= (1 + TOLERANCE) * paper, why))


def _runs(folder: Path, options: Options) -> Iterator[Run]:
    with ExitStack() as stack:
        data = Path(stack.enter_context(TemporaryDirectory()))
        kafka_address = stack.enter_context(LocalKafka(data)).address
        for seed in options.seeds:
            for system in SYSTEMS:
                yield learn(system, seed, folder, options, kafka_address)


def run(folder: Path, options: Options) -> Report:
    asked, count = options.settings, len(options.seeds)
    loss, in_flight = float(asked["loss"]), int(asked["in_flight"])
    runs: list[Run] = []
    for each in _runs(folder, options):
        runs.append(each)
        print(table([each], loss, in_flight).text(), flush=True)
    speeds = ", ".join(f"{kind} {1 / slowdown(kind):.2f}" for kind in "VRGQ")
    notes = [
        f"16 GPUs: four of each kind, of speeds {speeds}. A minibatch of {BATCH} digits takes a V "
        f"{BLOCKS * float(asked['block_s']):g} s: {BLOCKS} residual blocks of {asked['block_s']} s each, a third of it "
        "forward. These times are waited for; the arithmetic takes milliseconds.",
        f"ED is VRGQ four times, NP is VVVV, RRRR, GGGG and QQQQ; N_m = {in_flight}. Each minibatch moves the weights "
        f"by {asked['lr']} times its gradient, with the all-reduce too; `own step`: by {asked['own_lr']}, and "
        f"with the all-reduce by {asked['own_all_reduce_lr']} times the mean gradient of all 16.",
        f"Between two stages a minibatch's activations or gradients take {asked['link_s']} s. The all-reduce takes "
        f"{asked['ring_s']} s on 16 GPUs, as VGG-19's on links that are fitted to the paper, {asked['ring_12_s']} s "
        f"on 12, as ResNet-152's; it begins with the last layers' gradients, while others are computed. With NP a "
        f"push and a pull pass {asked['np_mbit_per_s']} Mbit/s; with ED parameters are on the nodes that compute them.",
        "The paper's Horovod cannot hold ResNet-152 on a G, so it has 12 GPUs there; VGG-19 fits on all 16. Both are "
        "shown; here all GPUs hold the model.",
        f"Drifting: each GPU's times have a lognormal factor of sigma {asked['drift']}, another one every "
        f"{asked['drift_every_s']} s.",
        "The all-reduce draws its minibatches in memory; virtual workers read theirs from Kafka, push to a server, and "
        "have a ledger and checkpoints. The server is one process, so the paper's placements (default, local) do not "
        "differ.",
        "Waiting: a minibatch had room in its virtual worker and was not admitted, while the first stage had nothing "
        "else to do; idle: no stage computed meanwhile. Oldest weights: of s_global. Losses are medians of "
        f"{_SMOOTHED} evaluations; rates and shares of virtual workers leave out the first {_WARM_S:g} s.",
    ]
    return Report(
        "HetPipe: virtual workers and all-reduce on unequal GPUs", [table(runs, loss, in_flight)], options.seeds,
        "one run each, so the spread is not known" if count == 1 else f"± is the standard deviation of {count} runs",
        claims(runs, loss, in_flight), notes, {"loss": loss, "runs": [each._asdict() for each in runs]},
    )  # fmt: skip


def draw(figure: Figure, data: dict[str, Any]) -> None:
    """Samples per second, and loss against time with constant and with drifting speeds."""
    from doll_lab.figures import decorate

    runs = [Run(**run) for run in data["runs"]]
    first = [run for run in runs if run.seed == runs[0].seed]
    rates, constant, drifting = figure.subplots(1, 3, width_ratios=(1.2, 1.0, 1.0))
    names = [f"{run.label}{', drifting' if run.is_drifting else ''}" for run in first]
    colors = [f"C{number}" for number in range(len(first))]
    drawn = rates.barh(names[::-1], [run.samples_per_s for run in first][::-1], 0.7, color=colors[::-1])
    rates.bar_label(drawn, fmt="%.0f", fontsize=7)
    rates.tick_params(axis="y", labelsize=7)
    decorate(rates, "throughput", "samples/s", "")
    for axes, is_drifting in ((constant, False), (drifting, True)):
        for run, color in zip(first, colors, strict=True):
            if run.is_drifting == is_drifting:
                axes.plot([at_s for at_s, _, _ in run.curve], run.losses, color=color, linewidth=1.2, label=run.label)
        axes.axhline(data["loss"], color="black", linewidth=0.8, linestyle=":")
        axes.set_ylim(0, 2.4)
        decorate(axes, f"{'drifting' if is_drifting else 'constant'} speeds", "seconds", "held-out loss")
        axes.legend(fontsize=6, frameon=False)
