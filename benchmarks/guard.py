"""The sample guard on healthy runs: gradients relative to the usual one, inspected batches, refused samples.

`python -m benchmarks.guard` learns from the streams of the examples, without the services, with the code that workers
and parameter server run. Nothing of a healthy stream may be refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from doll.config import JobConfig, load
from doll.consumers.compute.bisection import usual_norm
from doll.consumers.compute.gradient import Gradient, GradientComputer
from doll.consumers.compute.guard import Guard
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.model.flat_model import build
from doll.optim.optimizer import Optimizer
from doll.producers.sources import open_streams
from doll.task.base import load_task
from doll.task.batches import SampleBatch
from examples.stdin.task import random_event

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = EXAMPLES / "../../shared/data"
IMAGES, LABELS = (f"emnist_bymerge/{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
KDD = "kdd99/kddcup.data_10_percent.csv.gz"
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "digits": ("digits", 500, []),
    "digits, adam": ("digits", 300, ["training.optimizer={name: adam, lr: 0.002}"]),
    "intrusion": ("intrusion", 950, []),
    "intrusion, families": ("intrusion", 300, ["task.args.classes=families"]),
    "emnist": ("emnist", 120, []),
    "churn": ("stdin", 600, []),
    "synthetic, drift": (
        "digits",
        600,
        [
            "task={class: 'examples.synthetic.task:Gaussian', args: {features: 20, hidden: [16]}}",
            "source={kind: python, of: examples.synthetic.source:gaussians, args: {drift_per_sample: 0.0002}}",
        ],
    ),
}


class RecordingGuard(Guard):
    """Counts inspected batches and records the norms of gradients."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ratios: list[float] = []
        self.inspected = 0
        self.inspect_s = self.check_s = 0.0

    def is_unusual(self, gradient: Gradient) -> bool:
        started = time.perf_counter()
        is_unusual = super().is_unusual(gradient)
        self.check_s += time.perf_counter() - started
        if self._canary is not None:
            self.ratios.append(gradient.norm / (gradient.weight or 1.0) / max(self._norms.usual, 1e-300))
        return is_unusual

    def _spikes(self, samples: SampleBatch) -> dict[int, str]:
        started = time.perf_counter()
        spikes = super()._spikes(samples)
        self.inspected += 1
        self.inspect_s += time.perf_counter() - started
        return spikes

    def lengths(self, samples: SampleBatch) -> tuple[float, float]:
        """The largest gradient of a sample, relative to the batch's median and to the guard's usual gradient."""
        norms = self._norms_of(samples)
        ordinary = self._canary or samples.few(16)
        wrong = ordinary._replace(y=self._wrong_targets(ordinary.y))
        usual = max(usual_norm(self._norms_of(ordinary)), usual_norm(self._norms_of(wrong)))
        return max(norms) / max(median(norms), 1e-300), max(norms) / max(usual, 1e-300)


def records(config: JobConfig) -> list[Iterator[bytes]]:
    """The record values of each stream, one sample each."""
    if config.source is not None:
        return open_streams(config, [0] * config.data.workers)
    return [_churn(n) for n in range(config.data.workers)]


def _churn(seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    while True:
        yield json.dumps(random_event(rng)).encode()


def job(file: str, overrides: Sequence[str], data: Path) -> JobConfig:
    """An example's job, with its files in `data`."""
    paths = {
        "emnist": [
            *(f"source.args.{key}_path={data / path}" for key, path in (("images", IMAGES), ("labels", LABELS))),
            *(f"task.args.{key}_path={data / path}" for key, path in (("images", IMAGES), ("labels", LABELS))),
        ],
        "intrusion": [f"source.path={data / KDD}"],
    }
    return load(EXAMPLES / file / "job.yaml", [*overrides, *paths.get(file, [])])


def watch(name: str, data: Path, updates: int | None = None) -> dict[str, Any]:
    """One healthy run, in numbers."""
    file, count, overrides = RUNS[name]
    config = job(file, overrides, data)
    task = load_task(config)
    optimizer = Optimizer(build(config, task), config.training.optimizer, config.training.clip_norm)
    computer = GradientComputer(task, build(config, task))
    guards = [RecordingGuard(config, task, computer) for _ in range(config.data.workers)]
    streams, refused, compute_s, batches, losses, longest = records(config), 0, 0.0, 0, list[float](), (0.0, 0.0)
    turns = itertools.cycle(range(config.data.workers))
    for version in range(updates or count):
        computer.load(optimizer.weights)
        gradients, samples, loss = [], 0, 0.0
        for _ in range(config.group_size):
            worker = next(turns)
            values = list(enumerate(itertools.islice(streams[worker], config.data.batch_size)))
            if len(values) < config.data.batch_size:
                break
            decoded = decode_records(
                task, RawRecords(*zip(*values, strict=True)), samples_per_record=1, max_record_bytes=1 << 20
            )
            if version % 25 == 0 and not gradients:
                lengths = guards[worker].lengths(decoded.samples)
                longest = (max(longest[0], lengths[0]), max(longest[1], lengths[1]))
            started = time.perf_counter()
            gradient, bad = guards[worker].compute(decoded.x, decoded.y)
            compute_s += time.perf_counter() - started
            refused += len(bad)
            batches += 1
            if gradient is not None:
                gradients.append(gradient.values.copy())
                samples += decoded.num_samples - len(bad)
                loss += gradient.loss_sum
        optimizer.apply(gradients, 1 / max(samples, 1), samples)
        losses.append(loss / max(samples, 1))
    ratios = [ratio for guard in guards for ratio in guard.ratios]
    return {
        "run": name,
        "updates": len(losses),
        "batches": batches,
        "loss_first": round(losses[0], 3),
        "loss_last": round(float(np.mean(losses[-20:])), 4),
        "largest_batch_ratio": round(max(ratios), 2),
        "largest_sample_to_batch_median": round(longest[0], 1),
        "largest_sample_ratio": round(longest[1], 2),
        "inspected": sum(guard.inspected for guard in guards),
        "refused": refused,
        "ms_per_batch": round(1e3 * compute_s / batches, 2),
        "inspecting_percent": round(100 * sum(guard.inspect_s for guard in guards) / compute_s, 2),
    }


def cost(rounds: int = 40) -> dict[str, float]:
    """Milliseconds that the guard adds to a usual batch of 32 of the paper's network: the norm, and bookkeeping."""
    config = load(EXAMPLES / "emnist" / "job.yaml")  # its files are not read
    task = load_task(config)
    computer = GradientComputer(task, build(config, task))
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (32, *(task.input_shape or ()))).astype(np.uint8)
    y = rng.integers(0, 47, 32)
    guard = Guard(config, task, computer)
    guard.compute(x, y)
    compute, times = computer.compute, list[float]()
    for _ in range(rounds):
        started = time.perf_counter()
        gradient = compute(x, y)
        times.append(1e3 * (time.perf_counter() - started))
    computer.compute = lambda *_, **__: gradient  # type: ignore[method-assign]
    values = torch.from_numpy(gradient.values)
    bookkeeping_ms = _mean_ms(lambda: guard.compute(x, y))
    norm_ms = _mean_ms(lambda: float(torch.dot(values, values)))
    return {
        "compute_ms": min(times),
        "norm_ms": norm_ms,
        "bookkeeping_ms": bookkeeping_ms,
        "percent": 100 * (norm_ms + bookkeeping_ms) / min(times),
    }


def _mean_ms(call: Callable[[], object], rounds: int = 200) -> float:
    started = time.perf_counter()
    for _ in range(rounds):
        call()
    return 1e3 * (time.perf_counter() - started) / rounds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=list(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.runs:
        print(json.dumps(watch(name, given.data.resolve(), given.updates)), flush=True)
    print(json.dumps({key: round(value, 3) for key, value in cost().items()}))


if __name__ == "__main__":
    main()
