"""Losses for labels that come late, against an oracle that knows all labels at once.

    python -m benchmarks.delayed_feedback [--seeds 3] [--rate 0.1] [--docs]

Two streams, in virtual time:

- shop: the clicks of the example `delayed_clicks`, with purchases after minutes to days; the truth drifts.
- tips: New York's green taxi trips of January 2024, with the real times: features are known at the pickup, and whether
  the card was charged with a tip is known at the drop-off.

A fifth of the samples is held out. Every step of virtual time, the model learns the records that the joiner has sent
until then, with the production code for decoding, gradients and optimizer. Then it predicts the held-out samples of the
next step, whose true labels count. The first half of the stream is not counted. The learning rate of each loss is the
best of `RATES` on a seed of its own.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import product, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from doll import JoinedRecord, hash_ids
from doll.config import JobConfig, load
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.model.flat_model import build
from doll.ps.model.updater import make_parts
from doll.task import passes
from doll.task.base import Task, load_task
from doll.task.batches import SampleBatch
from doll.task.fields_task import Columns
from examples.delayed_clicks.task import DAY_S, EARLY_S, WINDOW_S, DelayedLabels, Emit, ShopClick, endless, joined

from benchmarks import results

ROOT: Final = Path(__file__).resolve().parents[1]
JOB: Final = ROOT / "examples" / "delayed_clicks" / "job.yaml"
TRIPS: Final = ROOT.parent / "shared" / "data" / "nyc_green_taxi_2024_01" / "trips.csv.gz"
HELD_OUT: Final = 0.2
DAYS: Final = 12  # of the shop
CLICKS_PER_DAY: Final = 5000
RATES: Final = (0.03, 0.1, 0.3)
TUNING_SEED: Final = 100
METHODS: Final[dict[str, tuple[Emit, str]]] = {  # name: what the joiner sends, and the loss
    "oracle": ("oracle", "early"),
    "wait for the window": ("once", "early"),
    "early negatives as truth": ("early", "early"),
    "retraction": ("early", "retraction"),
    "FNW": ("early", "fnw"),
    "FNC": ("early", "fnc"),
    "ES-DFM": ("early", "es_dfm"),
    "DEFER": ("early", "defer"),
    "DDFM": ("early", "ddfm"),
    "DFM": ("early", "dfm"),
}


class Trip(JoinedRecord):
    """A taxi trip at its pickup, and whether a tip was paid."""

    places: list[str]
    hour: int
    weekday: int
    purchase: bool


class Tips(DelayedLabels):
    """Predicts whether a tip is paid by card."""

    record = Trip
    num_numbers = 2
    early_s = 300.0
    unit_s = 900.0
    window_s = 3 * 3600.0

    def samples(self, columns: Columns) -> tuple[Any, Any]:
        places = np.array(columns["places"].tolist(), np.object_)
        hour, weekday = columns["hour"], columns["weekday"]
        ids = [hash_ids(places[:, at], size=self.columns, seed=at) for at in range(places.shape[1])]
        ids += [hash_ids(hour, weekday > 4, size=self.columns, seed=50)]
        angle = hour * 2 * np.pi / 24
        numbers = np.stack([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
        return {"ids": np.stack(ids, axis=1), "numbers": numbers}, columns.feedback("purchase")


class Data(NamedTuple):
    """A stream: its clicks in order, what its job changes, and the seconds of the joiner and of a step."""

    clicks: list[ShopClick]
    overrides: tuple[str, ...]
    early_s: float
    window_s: float
    step_s: float


def shop(seed: int, share: float) -> Data:
    days = DAYS * share
    clicks = takewhile(
        lambda click: click.time_s < days * DAY_S, endless(seed, CLICKS_PER_DAY, np.random.default_rng(seed))
    )
    return Data(
        list(clicks),
        ("task.args.holdout_clicks=0", "task.args.columns=4096", "training.policy.group_size=4"),
        EARLY_S,
        WINDOW_S,
        DAY_S / 4,
    )


def tips(seed: int, share: float) -> Data:
    """The trips do not depend on the seed, only which of them are held out."""
    with gzip.open(TRIPS, "rt") as file:
        trips = [_trip(row) for row in csv.DictReader(file)]
    begin_s = datetime(2024, 1, 1).timestamp()
    clicks = [
        ShopClick(time_s - begin_s, features, delay_s if has_tip else math.inf)
        for time_s, features, delay_s, has_tip in trips
        if time_s >= begin_s and 0 < delay_s < Tips.window_s
    ]
    clicks = clicks[: int(share * len(clicks))]
    overrides = (
        "task.class=benchmarks.delayed_feedback:Tips",
        "task.args={columns: 8192}",
        "training.policy.group_size=2",
    )
    return Data(clicks, overrides, Tips.early_s, Tips.window_s, 6 * 3600.0)


def _trip(row: dict[str, str]) -> tuple[float, dict[str, Any], float, bool]:
    pickup, dropoff = (datetime.fromisoformat(row[f"lpep_{name}_datetime"]) for name in ("pickup", "dropoff"))
    places = [
        row["PULocationID"], row["DOLocationID"], row["PULocationID"] + ">" + row["DOLocationID"], row["VendorID"],
        row["passenger_count"], row["RatecodeID"], row["trip_type"],
    ]  # fmt: skip
    features = {"places": places, "hour": pickup.hour, "weekday": pickup.weekday()}
    return pickup.timestamp(), features, (dropoff - pickup).total_seconds(), float(row["tip_amount"]) > 0


DATA: Final = {"shop": shop, "tips": tips}


class Decoded(NamedTuple):
    """Records in the order of their times, decoded."""

    times_s: npt.NDArray[np.float64]
    samples: SampleBatch

    def until(self, time_s: float) -> int:
        return int(np.searchsorted(self.times_s, time_s))


def decoded(task: Task, records: Iterable[tuple[float, bytes]]) -> Decoded:
    times_s, values = zip(*records, strict=True)
    raw = RawRecords(range(len(values)), values)
    batch = decode_records(task, raw, samples_per_record=1, max_record_bytes=10_000)
    if batch.refused:
        raise RuntimeError(f"expected good records: {batch.refused[0].reason}")
    return Decoded(np.array(times_s), batch.samples)


class Stream:
    """The stream of one seed, or the first `share` of it, decoded once for all losses."""

    def __init__(self, name: str, seed: int, share: float = 1.0) -> None:
        self.data = DATA[name](seed, share)
        is_held_out = np.random.default_rng((seed, 1)).random(len(self.data.clicks)) < HELD_OUT
        task = load_task(self.config())
        split: tuple[list[ShopClick], list[ShopClick]] = ([], [])
        for click, out in zip(self.data.clicks, is_held_out.tolist(), strict=True):
            split[out].append(click)
        self.learned: dict[str, Decoded] = {
            emit: decoded(task, joined(split[0], emit, early_s=self.data.early_s, window_s=self.data.window_s))
            for emit in ("early", "once", "oracle")
        }
        self.held_out = decoded(task, joined(split[1], "oracle"))

    def config(self, *overrides: str) -> JobConfig:
        return load(JOB, [*self.data.overrides, *overrides])


class Score(NamedTuple):
    """Of the held-out samples of the second half. `bias`: mean prediction over the share of positives, less 1."""

    auc: float
    log_loss: float
    bias: float


def learn(stream: Stream, method: str, rate: float) -> Score:
    emit, loss = METHODS[method]
    config = stream.config(f"task.args.loss={loss}", f"training.optimizer.lr={rate}")
    task: Any = load_task(config)
    torch.manual_seed(config.seed)
    model = build(config, task)
    updater, _ = make_parts(config.training, model)
    computer = GradientComputer(task, model)
    records, held_out, size = stream.learned[emit], stream.held_out, config.data.batch_size * config.group_size
    step_s, end_s = stream.data.step_s, float(held_out.times_s[-1])
    truth: Any = held_out.samples.y
    at, labels, predicted = 0, [np.zeros(0)], [np.zeros(0)]
    for step in range(1, int(end_s / step_s)):
        for start in range(at, records.until(step * step_s) - size + 1, size):
            gradient = computer.compute(*records.samples.take(slice(start, start + size)))
            if problem := gradient.problem():
                raise RuntimeError(f"{method}: {problem}")
            updater.apply([gradient.values.copy()], 1 / gradient.weight, gradient.weight)
            at = start + size
        next_step = slice(held_out.until(step * step_s), held_out.until((step + 1) * step_s))
        if step * step_s >= end_s / 2 and next_step.start < next_step.stop:
            inputs = passes.inputs_of(task, held_out.samples.take(next_step))
            with torch.inference_mode():
                output = passes.forward(task, model.module, inputs)
                predicted.append(task.probability(output).numpy().astype(np.float64))
            labels.append(truth["label"][next_step])
    return score(np.concatenate(labels), np.concatenate(predicted))


def score(labels: npt.NDArray[Any], predicted: npt.NDArray[np.float64]) -> Score:
    positives = labels.sum()
    _, places, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # of equal predictions: the mean of theirs
    auc = (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))
    p = predicted.clip(1e-6, 1 - 1e-6)
    log_loss = -(labels * np.log(p) + (1 - labels) * np.log1p(-p)).mean()
    return Score(float(auc), float(log_loss), float(predicted.mean() / labels.mean() - 1))


def table(scores: dict[str, dict[str, list[Score]]], rates: dict[str, dict[str, float]]) -> str:
    """Return the table: means over seeds, and the AUC less that of the oracle, in points, of the same seed."""
    lines = [
        "| stream | loss | AUC, % | AUC less the oracle's, points | log-loss | bias | lr |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, methods in scores.items():
        oracle = [row.auc for row in methods["oracle"]]
        for method, rows in methods.items():
            less = [100 * (row.auc - best) for row, best in zip(rows, oracle, strict=True)]
            spread = f" ± {statistics.stdev(less):.2f}" if len(less) > 1 else ""
            auc, log_loss, bias = (statistics.mean(values) for values in zip(*rows, strict=True))
            lines.append(
                f"| {name} | {method} | {100 * auc:.2f} | {statistics.mean(less):+.2f}{spread} | {log_loss:.4f} | "
                f"{bias:+.1%} | {rates[name][method]:g} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each stream; default 3")
    parser.add_argument("--stream", choices=DATA, action="append", help="only this stream")
    parser.add_argument("--method", choices=METHODS, action="append", help="only this loss, and the oracle")
    parser.add_argument("--rate", type=float, help="learning rate of all losses; default: the best of each")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/benchmarks.md")
    args = parser.parse_args(argv)
    if args.docs:
        results.refuse_dirty()
    torch.set_num_threads(1)
    commit = results.commit()
    methods = [method for method in METHODS if not args.method or method in ("oracle", *args.method)]
    names = [name for name in args.stream or DATA if name != "tips" or TRIPS.exists()]
    rates = {name: dict.fromkeys(methods, args.rate) for name in names}
    scores: dict[str, dict[str, list[Score]]] = {name: {method: [] for method in methods} for name in names}
    for name in names if args.rate is None else ():
        stream = Stream(name, TUNING_SEED)
        for method in methods:
            tried = {rate: learn(stream, method, rate) for rate in RATES}
            rates[name][method] = min(RATES, key=lambda rate: tried[rate].log_loss)
            print(name, method, tried, file=sys.stderr, flush=True)
    for seed, name in product(range(args.seeds), names):
        stream = Stream(name, seed)
        for method in methods:
            scores[name][method].append(learn(stream, method, rates[name][method]))
            print(name, seed, method, scores[name][method][-1], time.process_time(), file=sys.stderr, flush=True)
    text = f"Commit {commit}, {args.seeds} seeds.\n\n{table(scores, rates)}"
    print(text)
    if args.docs:
        results.update_section(
            results.DOCS / "benchmarks.md", "delayed-feedback", "python -m benchmarks.delayed_feedback --docs", text
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
