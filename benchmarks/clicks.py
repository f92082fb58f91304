"""Sparse logistic regression, one worker over Kafka, against River and Vowpal Wabbit: `python -m benchmarks.clicks`.

All learn the same made-up clicks in the same order, and are tested on each before they learn it. DOLL reads packed
records from Kafka; River and Vowpal Wabbit are given features that were made before the clock starts. See
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from doll.config import JobConfig
from doll.errors import DollError
from doll.kafka import topics
from doll.producers.sources import CONCEPT, SAMPLES, child_rng
from doll.records import packing
from examples.clicks import task as made
from examples.clicks.task import Clicks

from benchmarks.harness import Bench, LearningResult, Observer, busy_s, idle_share, job
from benchmarks.intake import fill_topic
from benchmarks.results import keep
from benchmarks.where import tables_of

COLUMNS: Final = 100_000
PACKED: Final = 64  # samples in a record
CHUNK: Final = 20_480  # clicks whose features are made at once; a multiple of PACKED
GOAL_RATIO: Final = 3.0  # DOLL's samples/s over River's
_SEED: Final = 0
_TINY: Final = 1e-7  # River's probabilities may round to 0 or 1
_VW: Final = "--loss_function logistic -b 18 --quiet"
VOWPAL_WABBIT: Final = {"vw: default": "", "vw: -l 1": "-l 1"}
# All learning rates were the best on a stream of another seed, out of steps of 2 to 2.5 (of DOLL's AdaGrad, up to 2).
RIVER: Final = {
    "river: SGD 0.01 (default)": ("SGD", 0.01),
    "river: SGD 0.02": ("SGD", 0.02),
    "river: AdaGrad 0.1": ("AdaGrad", 0.1),
}


def _adagrad(lr: float, momentum: float) -> dict[str, Any]:
    """On the sum of a batch's gradients: so the accumulator's first value is in clicks, whatever the batch's size."""
    adagrad = {"name": "adagrad", "lr": lr, "momentum": momentum, "initial_accumulator": 3.0}
    return {"reduction": "sum", "optimizer": adagrad}


# Batch size, `training`, and arguments of the task.
DOLL: Final[dict[str, tuple[int, dict[str, Any], dict[str, Any]]]] = {
    "doll: Adam 0.03, b = 2048": (2048, {"optimizer": {"name": "adam", "lr": 0.03}}, {}),
    "doll: AdaGrad, b = 512": (512, _adagrad(0.04, 0.8), {}),
    "doll: AdaGrad, b = 768": (768, _adagrad(0.04, 0.8), {}),
    "doll: AdaGrad, b = 1024": (1024, _adagrad(0.04, 0.8), {}),
    "doll: AdaGrad, b = 2048": (2048, _adagrad(0.04, 0.8), {}),
    "doll: AdaGrad, b = 512, tables": (512, _adagrad(0.2, 0.0), {"sparse": True}),
}


class Result(NamedTuple):
    """A learner on the whole stream.

    Attributes:
        samples_per_s: of testing and learning.
        log_loss: mean over all clicks, each before it was learned, in nats.
        cpu_us: CPU time per click of all its processes, in microseconds.
        others: share of the machine that other processes used.
    """

    samples_per_s: float
    log_loss: float
    cpu_us: float
    others: float


class Stopwatch:
    """Adds up what passes between `start` and `stop`: in this process and in all others."""

    def __init__(self) -> None:
        self._seconds = self._cpu_s = self._busy_s = 0.0

    def start(self) -> None:
        self._busy_s -= busy_s()
        self._cpu_s -= time.process_time()
        self._seconds -= time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter()
        self._cpu_s += time.process_time()
        self._busy_s += busy_s()

    def result(self, samples: int, loss_sum: float) -> Result:
        others = max(0.0, self._busy_s - self._cpu_s) / (self._seconds * (os.cpu_count() or 1))
        return Result(samples / self._seconds, loss_sum / samples, 1e6 * self._cpu_s / samples, others)


def stream(samples: int) -> Iterator[npt.NDArray[Any]]:
    """The clicks, of dtype `RECORD`, in chunks: the same in each call."""
    truth, rng = truth_of_stream(), child_rng(_SEED, SAMPLES)
    for at in range(0, samples, CHUNK):
        yield made.draw(truth, min(CHUNK, samples - at), rng)[0]


def truth_of_stream() -> made.Truth:
    return made.draw_truth(1000, 1.1, 0.3, child_rng(_SEED, CONCEPT))


def features(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The numbers, columns and labels of clicks that DOLL's task makes of them, shapes (n, 13), (n, 26) and (n,)."""
    block = Clicks(COLUMNS).decode_block(memoryview(rows.tobytes()), made.RECORD.itemsize)
    assert block is not None, "made-up clicks are good"
    x, y = block
    counts = x[:, : made.COUNTS].astype(np.float64)
    numbers = np.sign(counts) * np.log1p(np.abs(counts)) * made.LOG_SCALE
    numbers[x[:, : made.COUNTS] == made.NO_COUNT] = 0.0
    return numbers, x[:, made.COUNTS :], y


def learn_with_river(samples: int, optimizer: str, rate: float) -> Result:
    """River's `predict_proba_one` and `learn_one` on dictionaries."""
    from river import linear_model, optim

    model = linear_model.LogisticRegression(optimizer=getattr(optim, optimizer)(rate))
    watch, loss = Stopwatch(), 0.0
    for rows in stream(samples):
        numbers, columns, y = features(rows)
        clicks, labels = dictionaries(numbers, columns), y.astype(bool).tolist()
        probabilities = []
        watch.start()
        for click, label in zip(clicks, labels, strict=True):
            probabilities.append(model.predict_proba_one(click)[True])
            model.learn_one(click, label)
        watch.stop()
        p = np.clip(np.array(probabilities), _TINY, 1 - _TINY)
        loss -= float(np.where(y == 1, np.log(p), np.log1p(-p)).sum())
    return watch.result(samples, loss)


def dictionaries(numbers: npt.NDArray[np.float64], columns: npt.NDArray[np.int32]) -> list[dict[Any, float]]:
    """Clicks as River takes them."""
    clicks = []
    for values, places in zip(numbers.tolist(), columns.tolist(), strict=True):
        click: dict[Any, float] = {f"i{at}": value for at, value in enumerate(values) if value}
        for place in places:
            click[place] = click.get(place, 0.0) + 1.0  # two categories may share a column
        clicks.append(click)
    return clicks


def learn_with_vw(samples: int, arguments: str) -> Result:
    """Vowpal Wabbit's `learn` on lines of its text format; it predicts each before it learns it."""
    import vowpalwabbit

    workspace = vowpalwabbit.Workspace(f"{_VW} {arguments}")
    watch = Stopwatch()
    for rows in stream(samples):
        clicks = vw_lines(*features(rows))
        watch.start()
        for click in clicks:
            workspace.learn(click)
        watch.stop()
    loss = workspace.get_sum_loss()
    workspace.finish()
    return watch.result(samples, loss)


def vw_lines(numbers: npt.NDArray[np.float64], columns: npt.NDArray[np.int32], y: npt.NDArray[np.int64]) -> list[str]:
    """Clicks as Vowpal Wabbit takes them."""
    lines = []
    for label, values, places in zip(y.tolist(), numbers.tolist(), columns.tolist(), strict=True):
        counts = " ".join(f"i{at}:{value:.6g}" for at, value in enumerate(values) if value)
        lines.append(f"{1 if label else -1} | {counts} {' '.join(map(str, places))}")
    return lines


def job_of(samples: int, batch: int, training: dict[str, Any], args: dict[str, Any]) -> JobConfig:
    """DOLL's job: one worker, a step after each batch; everything else as a user gets it."""
    return job(
        f"bench-clicks-{samples}",
        task="examples.clicks.task:Clicks",
        args={"columns": COLUMNS, **args},
        data={"workers": 1, "batch_size": batch, "samples_per_record": PACKED},
        training={"policy": {"name": "doll", "group_size": 1}, **training},
        stop={"samples": samples // batch * batch},
    )


def fill(bench: Bench, config: JobConfig, samples: int) -> None:
    """Write the stream to the job's topic."""
    topics.ensure(config, bench.stack.services)
    packs = []
    for rows in stream(samples):
        clicks = [row.tobytes() for row in rows]
        packs += [packing.pack(clicks[at : at + PACKED]) for at in range(0, len(clicks), PACKED)]
    fill_topic(config, bench.stack.services, packs, len(packs))


def learn_with_doll(bench: Bench, config: JobConfig) -> Result:
    """The whole stream from Kafka, from the first update to the last."""
    learned = bench.learn(config, warm_s=0.0)
    batch = config.data.batch_size
    # The update that begins the measurement is not in `updates`: of a model of zeros each click has this log-loss.
    loss = batch * math.log(2) + sum(update.loss * update.n_samples for update in learned.updates)
    count = batch + sum(update.n_samples for update in learned.updates)
    cpu_s = sum(seconds for name, seconds in learned.usage.cpu_s.items() if name not in ("bench", "others"))
    return Result(learned.samples_per_s, loss / count, 1e6 * cpu_s / count, learned.usage.others)


def _observed(bench: Bench, config: JobConfig, observer: Observer) -> LearningResult:
    return bench.learn(config, warm_s=0.5, observer=observer)


def summarize(runs: Sequence[tuple[str, Result]]) -> list[dict[str, Any]]:
    """A row for each learner: medians, the range of its samples/s, its ratio to each River row."""
    rows = []
    for name in dict.fromkeys(name for name, _ in runs):
        results = [result for other, result in runs if other == name]
        speeds = [result.samples_per_s for result in results]
        rows.append(
            {
                "name": name, "n": len(results), "samples_per_s": statistics.median(speeds), "low": min(speeds),
                "high": max(speeds), "log_loss": statistics.median(result.log_loss for result in results),
                "cpu_us": statistics.median(result.cpu_us for result in results),
                "others": statistics.median(result.others for result in results),
            }
        )  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]], bayes: float) -> str:
    """In Markdown: the learners, and DOLL's rows compared with the others."""
    lines = [
        "| learner | n | samples/s | range | log-loss | CPU per sample | others |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['n']} | {row['samples_per_s']:,.0f} | {row['low']:,.0f} to {row['high']:,.0f} "
            f"| {row['log_loss']:.4f} | {row['cpu_us']:.1f} us | {row['others']:.0%} |"
        )
    lines += ["", f"Log-loss of the true probabilities: {bayes:.4f}.", ""]
    lines += ["| | samples/s | log-loss | goal |", "| --- | ---: | ---: | --- |"]
    for own in (row for row in rows if row["name"].startswith("doll")):
        for other in (row for row in rows if not row["name"].startswith("doll")):
            ratio, difference = own["samples_per_s"] / other["samples_per_s"], own["log_loss"] - other["log_loss"]
            goal = ""
            if other["name"].startswith("river"):
                goal = "met" if ratio >= GOAL_RATIO and difference <= 0 else "**NO**"
            lines.append(f"| {own['name']} / {other['name']} | {ratio:.2f} | {difference:+.4f} | {goal} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clicks", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=614_400, help="clicks in the stream; default 614,400")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each learner, in turn; default 3")
    parser.add_argument("--rows", default="", help="only those rows of DOLL whose names contain this text")
    parser.add_argument("--wait-s", type=float, default=20.0, help="longest wait for an idle machine before each run")
    parser.add_argument("--only-doll", action="store_true", help="without River and Vowpal Wabbit")
    parser.add_argument("--profile", action="store_true", help="CPU time of DOLL by thread and function, and no more")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started here is ended
    began = datetime.now()
    runs: list[tuple[str, Result]] = []
    samples = args.samples // CHUNK * CHUNK

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    def measure(name: str, learn: Callable[[], Result]) -> None:
        deadline_s = time.monotonic() + args.wait_s
        while idle_share() < 0.9 and time.monotonic() < deadline_s:
            pass
        runs.append((name, learn()))
        result = runs[-1][1]
        say(
            f"{name}: {result.samples_per_s:,.0f}/s, log-loss {result.log_loss:.4f}, {result.cpu_us:.1f} us of CPU, "
            f"others {result.others:.0%}"
        )

    with Bench(say) as bench:
        configs = {name: job_of(samples, *row) for name, row in DOLL.items() if args.rows in name}
        fill(bench, next(iter(configs.values())), samples)
        if args.profile:
            for name, config in configs.items():
                for text_table in tables_of(partial(_observed, bench, config), name, say, seconds=2.0):
                    print(text_table.text(120))
            return 0
        try:
            for _ in range(args.repetitions):
                for name, config in configs.items():
                    measure(name, partial(learn_with_doll, bench, config))
                if not args.only_doll:
                    for name, (optimizer, rate) in RIVER.items():
                        measure(name, partial(learn_with_river, samples, optimizer, rate))
                    for name, arguments in VOWPAL_WABBIT.items():
                        measure(name, partial(learn_with_vw, samples, arguments))
        except (KeyboardInterrupt, RuntimeError, DollError) as exc:
            say(f"{type(exc).__name__} {exc}: the figures so far")
    bayes = made.bayes_log_loss(truth_of_stream(), child_rng(_SEED, SAMPLES, 1))
    rows = summarize(runs)
    keep(
        f"clicks-{began:%Y%m%d-%H%M%S}",
        {"samples": samples, "cores": os.cpu_count(), "bayes": bayes, "rows": rows, "runs": [[n, *r] for n, r in runs]},
    )
    print(table(rows, bayes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
