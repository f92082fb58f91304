"""Planted changes of a stream: the delay of `drift`, false alarms, and how soon the model follows with `drift.react`.

    python -m benchmarks.drift --seeds 5            # 2 minutes; --docs puts the table into docs/benchmarks.md

Jobs learn in virtual time with the code of live workers and servers, on Gaussian classes. In one half of the runs, the
classes change their places after `CHANGE` samples. The reference is River's detector on the loss of each *sample*, of
the same stream and a model that learns it sample by sample in batches of the same size; DOLL has the mean of an update.
On Elec2, whose changes nobody knows, the numbers of alarms stand beside each other.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from doll.config import JobConfig, parse
from doll.config.drift import DriftConfig
from doll.evaluation.drift import DriftWatch
from doll.producers.sources import Stream
from doll.ps.engine import events as ev
from doll.ps.server import update_record
from doll.records.control import Drifted, TermStarted
from river import drift as river_drift

from benchmarks import electricity
from benchmarks.results import DOCS, commit, keep, update_section
from doll_lab.simulation.learning import LearningWorld

CHANGE: Final = 40_000  # samples before the change
AFTER: Final = 40_000
STATIONARY: Final = 100_000
WARM_UP: Final = 10_000  # samples before which an alarm counts for nothing: the model learns
NEAR: Final = 1.1  # the loss is back when a mean over `WINDOW` updates is below this times the one before the change
WINDOW: Final = 25
FEATURES: Final = 8
JOB: Final = f"""
job: drifting
task: {{class: "examples.synthetic.task:Gaussian", args: {{features: {FEATURES}, classes: 4}}}}
data: {{workers: 2, batch_size: 16}}
training: {{policy: {{name: doll, group_size: 2}}, optimizer: {{name: sgd, lr: 0.02}}}}
evaluation: {{max_samples: 10}}
"""
TABLE: Final = "drift"


def moved(stream: Stream, change: int = 0) -> Iterator[bytes]:
    """Yield records of four Gaussian classes, whose places are exchanged after `change` records of all streams; 0:
    never."""
    centres = stream.shared_rng().normal(size=(4, FEATURES)) * 1.2
    rng, count = stream.rng(), 0
    while True:
        label = int(rng.integers(4))
        is_moved = bool(change) and count * stream.count >= change
        count += 1
        x = centres[(label + 1) % 4 if is_moved else label] + rng.normal(0, 1, FEATURES)
        yield np.append(x, label).astype("<f4").tobytes()


class Run(NamedTuple):
    """What a run showed, in samples. `delay`: -1: the change was not found."""

    losses: npt.NDArray[np.float64]  # (samples, loss) of each update
    alarms: list[int]


class DriftingWorld(LearningWorld):
    """A job whose updates are watched as the evaluator watches them."""

    def __init__(self, config: JobConfig) -> None:
        self.watch = DriftWatch(config.drift or DriftConfig())
        self.watch.feed(TermStarted(term=1, resumed_version=0, origins=(), records_per_batch=1, time_s=0.0))
        self.losses: list[tuple[int, float]] = []
        self.alarms: list[int] = []
        super().__init__(config)

    def _evaluate(self) -> Any:
        """Measure nothing held out."""

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        outcome = super().perform(action)
        if isinstance(action, ev.ApplyUpdate):
            samples = sum(item.num_samples for item in action.sets)
            record = update_record(
                action, term=1, num_samples=samples, apply_s=0.0, now=self.now, counters=Counter()
            )  # fmt: skip
            self.losses.append((record.samples_total, record.loss))
            for drift in self.watch.feed(record):
                self.alarms.append(record.samples_total)
                event = Drifted(term=1, version=drift.version, metric=drift.metric)
                self._after(0.0, lambda event=event: self.handle(event))  # type: ignore[misc]
        return outcome


def run(seed: int, change: int, samples: int, react: str = "") -> Run:
    section = f"{{react: {react}}}" if react else "{}"
    world = DriftingWorld(
        parse(
            JOB,
            [
                f"source={{kind: python, of: benchmarks.drift:moved, args: {{change: {change}}}}}", f"seed={seed}",
                f"stop={{samples: {samples}}}", f"drift={section}",
            ],
        )
    )  # fmt: skip
    world.run()
    return Run(np.array(world.losses), world.alarms)


def back_after(of: Run, change: int) -> float:
    """The samples from the change until the loss is back; infinity: it is not."""
    samples, losses = of.losses[:, 0], of.losses[:, 1]
    usual = losses[(samples > change - 10_000) & (samples <= change)].mean()
    means = np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid")
    ends = samples[WINDOW - 1 :]
    peak = int(np.argmax(np.where(ends > change, means, -np.inf)))
    after = np.flatnonzero(means[peak:] <= NEAR * usual)
    return float(ends[peak + after[0]] - change) if len(after) else float("inf")


def sample_losses(records: Iterator[bytes], task: Any, count: int, batch: int, lr: float, seed: int) -> list[float]:
    """Losses of single samples before the model learns from them, in batches."""
    torch.manual_seed(seed)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses: list[float] = []
    while len(losses) < count:
        rows = [task.decode(record) for record in islice(records, batch)]
        x, y = torch.tensor(np.stack([row.x for row in rows])), torch.tensor([row.y for row in rows])
        each = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        losses += each.tolist()
    return losses


def river_alarms(losses: list[float]) -> list[int]:
    """Where River's ADWIN finds a change for the worse in the losses of samples, scaled to [0, 1]."""
    detector, alarms, scale = river_drift.ADWIN(), [], statistics.median(losses[:500])
    for at, loss in enumerate(losses, 1):
        before = detector.estimation
        detector.update(loss / (loss + scale))
        if detector.drift_detected and detector.estimation > before:
            alarms.append(at)
    return alarms


def _stream(seed: int) -> Stream:
    return Stream(number=0, count=1, sent=0, seed=seed, max_record_bytes=1 << 20)


def _spread(values: list[float]) -> str:
    known = [value for value in values if value < float("inf")]
    middle = f"{statistics.median(known):,.0f} ({min(known):,.0f} to {max(known):,.0f})" if known else "-"
    return middle + (f", {len(values) - len(known)} not" if len(known) < len(values) else "")


def measured(seeds: int) -> list[tuple[str, str]]:
    """The rows of the table."""
    from examples.synthetic.task import Gaussian

    task, delays, river, plain, reacted, false, river_false = Gaussian(FEATURES, 4), *([] for _ in range(6))  # type: ignore[misc]
    for seed in range(seeds):
        of = run(seed, CHANGE, CHANGE + AFTER)
        faster = run(seed, CHANGE, CHANGE + AFTER, "{lr_factor: 5, updates: 400}")
        delays.append(min((at - CHANGE for at in of.alarms if at > CHANGE), default=float("inf")))
        plain.append(back_after(of, CHANGE))
        reacted.append(back_after(faster, CHANGE))
        still = run(seed, 0, WARM_UP + STATIONARY)
        false.append(sum(at > WARM_UP for at in still.alarms))
        for change, into in ((CHANGE, river), (0, river_false)):
            count = CHANGE + AFTER if change else WARM_UP + STATIONARY
            losses = sample_losses(moved(_stream(seed), change), task, count, 32, 0.02, seed)
            alarms = river_alarms(losses)
            if change:
                into.append(min((at - change for at in alarms if at > change), default=float("inf")))
            else:
                into.append(sum(at > WARM_UP for at in alarms))
    shares = [f"{later / sooner:.2f}" for sooner, later in zip(plain, reacted, strict=True)]
    rows = [
        ("delay after the change, samples: `drift`, from means of updates", _spread(delays)),
        ("delay, samples: River's ADWIN on the loss of each sample", _spread(river)),
        (f"false alarms in {STATIONARY:,} stationary samples: `drift`, of each seed", ", ".join(map(str, false))),
        ("false alarms: River's ADWIN on the loss of each sample", ", ".join(map(str, river_false))),
        ("the loss is back after samples, without `react`", _spread(plain)),
        ("the loss is back after samples, `react: {lr_factor: 5, updates: 400}`", _spread(reacted)),
        ("the same, share of the time without, by seed", ", ".join(shares)),
    ]  # fmt: skip
    if electricity.PATH.exists():
        losses = sample_losses(
            electricity.samples(_stream(0)), electricity.Electricity(), 40_000, 32, 0.05, 0
        )  # fmt: skip
        watch, alarms = DriftWatch(DriftConfig()), 0
        watch.feed(TermStarted(term=1, resumed_version=0, origins=(), records_per_batch=1, time_s=0.0))
        for version, begin in enumerate(range(0, len(losses), 32), 1):
            alarms += len(watch.feed(_update(version, losses[begin : begin + 32])))
        both = f"{alarms}; {len(river_alarms(losses))}"
        rows.append(("alarms on Elec2, 40,000 half-hours: `drift`; River's ADWIN", both))
    return rows


def _update(version: int, losses: list[float]) -> Any:
    from doll.records.control import Member, Update

    member = Member(
        worker=0, partition=0, batch=version - 1, lo=32 * (version - 1), hi=32 * version, n_samples=len(losses),
        base_version=version - 1,
    )  # fmt: skip
    return Update(
        term=1, version=version, members=(member,), n_samples=len(losses), loss=statistics.fmean(losses),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/benchmarks.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(given.seeds)
    lines = ["| what | median (range) |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    text = "\n".join([f"Commit {commit()}, {given.seeds} seeds.", "", *lines])
    print(text)
    keep(TABLE, {"seeds": given.seeds, "rows": rows})
    if given.docs:
        update_section(DOCS / "benchmarks.md", TABLE, "python -m benchmarks.drift --docs", text)


if __name__ == "__main__":
    main()
