"""PMF of MovieLens 1M without services: the plain program, and River's matrix factorization as a check from outside.

    python -m benchmarks.ratings [--job examples/ratings/job.yaml] [--passes 3] [--river-passes 3]

Both learn the stream of the job file in an order of their own and are measured on its held-out ratings, which no one
learns. `doll up ratings` is the live run of the same model. River comes with the extra `bench`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from doll.config import load
from doll.records.lines import read_file
from doll.task.base import load_task
from doll.task.batches import batch_of
from examples.ratings import task as ratings
from examples.ratings.task import Pmf

from benchmarks.plain_models import PlainFactors

JOB = Path(__file__).parents[1] / "examples" / "ratings" / "job.yaml"
RIVER_RATE, RIVER_PENALTY = 0.01, 0.02
Array = npt.NDArray[Any]


def rmse(predictions: Array, truth: Array) -> float:
    """Root of the mean squared error."""
    return math.sqrt(float(((predictions - truth) ** 2).mean()))


def shuffles(x: Array, y: Array, passes: int) -> Iterator[tuple[Array, Array]]:
    """All ratings once for each pass, each time in another order."""
    rng = np.random.default_rng(0)
    for _ in range(passes):
        order = rng.permutation(len(x))
        yield x[order], y[order]


def plain(
    task: Pmf, job: Any, x: Array, y: Array, passes: int, measure: Callable[[str, Array], None], ids: Array
) -> None:
    rng = np.random.default_rng(1)
    model = PlainFactors(
        rng.normal(0.0, task.deviation, (task.users, task.rank)),
        rng.normal(0.0, task.deviation, (task.items, task.rank)),
        regularization=task.regularization, biases=task.biases, mean=task.mean,
    )  # fmt: skip
    size = job.data.batch_size * job.group_size
    for number, (inputs, targets) in enumerate(shuffles(x, y, passes), 1):
        for first in range(0, len(inputs), size):
            model.learn(inputs[first : first + size], targets[first : first + size], job.training.optimizer.lr)
        measure(f"plain program, {size} ratings a step, pass {number}", model.predict(ids))


def river(task: Pmf, x: Array, y: Array, passes: int, measure: Callable[[str, Array], None], ids: Array) -> None:
    from river import optim, reco

    model = reco.BiasedMF(
        n_factors=task.rank, bias_optimizer=optim.SGD(RIVER_RATE), latent_optimizer=optim.SGD(RIVER_RATE),
        l2_bias=RIVER_PENALTY, l2_latent=RIVER_PENALTY, latent_initializer=optim.initializers.Normal(sigma=0.1, seed=1),
        seed=1,
    )  # fmt: skip
    for number, (inputs, targets) in enumerate(shuffles(x, y, passes), 1):
        for (user, item), target in zip(inputs.tolist(), targets.tolist(), strict=True):
            model.learn_one(user, item, target)
        predictions = np.array([model.predict_one(user, item) for user, item in ids.tolist()])
        measure(f"River, BiasedMF, one rating a step, pass {number}", predictions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=JOB)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--river-passes", type=int, default=3)
    asked = parser.parse_args()
    job = load(asked.job)
    task, source = load_task(job), job.source
    args = getattr(source, "args", {})
    if not isinstance(task, Pmf) or "ratings_path" not in args:
        sys.exit(f"{asked.job}: expected a task of class Pmf and a source of kind python with args.ratings_path")
    path = job.path(Path(args["ratings_path"]))
    if not path.is_file():
        sys.exit(f"{path}: expected the ratings of MovieLens 1M; name another job file with --job")
    records = ratings.records(read_file(path, header=args.get("header", False)), task.holdout_one_in)
    x, y = task.decode_many(list(records))
    ids, truth = batch_of(task, task.holdout())[:2]
    alone = rmse(np.full(len(ids), y.mean()), truth)
    print(f"{len(x):,} ratings, {len(ids):,} held out; RMSE of their mean alone {alone:.4f}")
    begun_s = time.perf_counter()

    def measure(name: str, predictions: Array) -> None:
        print(f"{name:55} RMSE {rmse(predictions, truth):.4f}  {time.perf_counter() - begun_s:6.1f} s", flush=True)

    plain(task, job, x, y, asked.passes, measure, ids)
    if asked.river_passes:
        begun_s = time.perf_counter()
        river(task, x, y, asked.river_passes, measure, ids)


if __name__ == "__main__":
    main()
