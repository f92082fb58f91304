"""Which replica of an `isp` job is the worst, and who can tell: `python -m benchmarks.replicas`.

PMF of MovieLens 1M with the workers' own filter, in one process, in rounds. Every few rounds each replica is evaluated
on the samples that all workers share, as a worker does it, and on all held-out samples. At each look, what scale-in
would choose is compared with the replica that was the worst on all held-out samples over the evaluations it uses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from doll.config import load
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.shared_samples import SharedSamples
from doll.model.flat_model import build
from doll.optim.significance_filter import Residual
from doll.producers.sources import open_streams
from doll.task.base import load_task
from doll.task.batches import SampleBatch, batch_of
from doll.theory.comparison import certain_largest

from benchmarks.results import keep

JOB: Final = Path("examples/ratings/job.yaml")
LR: Final = 40.0  # as in benchmarks.live.mlless_scale_in
WINDOW: Final = 48  # evaluations that scale-in compares at most
FIRST: Final = 24
_OLD_WEIGHT: Final = 0.1  # of the newest batch in the mean by which scale-in chose before


def learn(ratings: str, seed: int, rounds: int, workers: int, noise: float) -> dict[str, np.ndarray]:
    """One run. `noise`: standard deviation of what is added to the last worker's ratings, so that its data differ."""
    config = load(
        JOB, [f"source.args.ratings_path={ratings}", f"task.args.ratings_path={ratings}", f"seed={seed}",
              f"data.workers={workers}", "data.batch_size=4096", "training.policy={name: isp, significance: 0.7}"],
    )  # fmt: skip
    task, rng = load_task(config), np.random.default_rng(seed)
    model = build(config, task)
    computer = GradientComputer(task, model)
    shared, held_out = SharedSamples(config, task, computer), batch_of(task, task.holdout(), 10_000)
    published = computer.weights.copy()
    streams = open_streams(config, [0] * workers)
    residuals = [Residual(config.training.policy.filter_threshold, model.num_parameters) for _ in range(workers)]
    result: dict[str, list[list[float]]] = {"own": [], "shared": [], "held_out": []}
    for version in range(rounds):
        sent, losses = np.zeros_like(published), np.zeros((3, workers))
        for worker, residual in enumerate(residuals):
            computer.load(published)
            residual.add_to(computer.weights)
            if (loss := shared.loss(version)) is not None:
                losses[1:, worker] = loss, computer.loss(*held_out)
            records = list(islice(streams[worker], config.data.batch_size))
            samples = task.decode_block(memoryview(b"".join(records)), len(records[0]))
            assert samples is not None, "the source packs ratings"
            batch = SampleBatch(*samples)
            if noise and worker == workers - 1:
                batch = batch._replace(y=batch.y + rng.normal(0, noise, len(batch.y)).astype(np.float32))
            gradient = computer.compute(*batch)
            losses[0, worker] = gradient.loss_sum / gradient.weight
            step = np.float32(-LR / gradient.weight) * gradient.values
            computer.weights[:] += step
            residual.split(step, computer.weights, version, version)
            sent += step
        published += sent
        result["own"].append(losses[0].tolist())
        if losses[1].any():
            result["shared"].append(losses[1].tolist())
            result["held_out"].append(losses[2].tolist())
    return {name: np.array(rows) for name, rows in result.items()}


def looks(run: dict[str, np.ndarray], every: int) -> list[dict[str, Any]]:
    """What both rules choose, after every so many evaluations."""
    per = len(run["own"]) // len(run["shared"])
    chosen = []
    for end in range(FIRST, len(run["shared"]) + 1, every):
        window = slice(max(0, end - WINDOW), end)
        truth = run["held_out"][window].mean(axis=0)
        mean = run["own"][0]
        for row in run["own"][1 : end * per]:
            mean = mean + _OLD_WEIGHT * (row - mean)
        excess = np.round(mean / mean.mean() - 1, 2)
        worst = certain_largest(run["shared"][window])
        chosen.append(
            {
                "worst": int(truth.argmax()), "spread": float(truth.std(ddof=1) / truth.mean()),
                "before": int(excess.argmax()) if excess.max() > np.sort(excess)[-2] else -1,
                "now": -1 if worst is None else worst.column,
            }
        )  # fmt: skip
    return chosen


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__.splitlines()[0])
    parser.add_argument("--ratings", required=True, help="ratings.csv.gz of MovieLens 1M")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=12, help="evaluations between two looks")
    parser.add_argument("--noise", type=float, default=0.0, help="of the last worker's ratings")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    every: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        run = learn(str(Path(args.ratings).resolve()), seed, args.rounds, args.workers, args.noise)
        every += looks(run, args.every)
        spread = run["held_out"].std(axis=1, ddof=1) / run["held_out"].mean(axis=1)
        apart = run["held_out"] - run["held_out"].mean(axis=1, keepdims=True)
        apart = apart - apart.mean(axis=0)
        memory = [float((apart[lag:] * apart[:-lag]).sum() / (apart**2).sum()) for lag in (1, 2, 4, 8)]
        print(f"seed {seed}: held-out losses of the replicas differ by {spread.mean():.4%}; from one evaluation to the "
              f"next 1, 2, 4 and 8 there remain {', '.join(f'{share:.2f}' for share in memory)}; held out "
              f"{run['held_out'][-1].mean():.4f}", flush=True)  # fmt: skip
    for rule in ("before", "now"):
        named = [look for look in every if look[rule] >= 0]
        right = sum(look[rule] == look["worst"] for look in named)
        last = sum(look[rule] == args.workers - 1 for look in named)
        print(f"{rule}: a replica is named in {len(named)} of {len(every)} looks, the worst one in {right}, the last "
              f"worker's in {last}")  # fmt: skip
    print(keep(f"replicas-{datetime.now():%Y%m%d-%H%M%S}", {"args": vars(args), "looks": every}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
