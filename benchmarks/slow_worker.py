"""One slow worker: what groups of exact and of recent versions learn in virtual time, and how old their gradients are.

    python -m benchmarks.slow_worker [--slowness 4] [--workers 4] [--group-size 4] [--samples 48000] [--seeds 0,1,2]

Production engine, policy, gradients and optimizer learn handwritten digits; the time of a batch is drawn, and records
take no time. Worker 0 takes `--slowness` times as long as the others.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from doll.config import SgdConfig
from doll.config.policy import PolicyConfig
from doll.ps.engine.events import ApplyUpdate, EngineAction, Event
from doll.ps.policies.doll import DollPolicyConfig
from doll.records.control import Grant
from doll.task import images
from examples.digits.task import Digits, originals

from benchmarks.paper.learning import Learner
from benchmarks.tables import Table
from doll_lab.simulation.timed_world import UNBOUNDED, TimedWorld

BATCH_SIZE: Final = 32
_SHAPE: Final = 20  # of the Gamma distribution of a batch's seconds: a coefficient of variation of 0.22
_EVALUATE_EVERY: Final = 12  # updates


class Job(TimedWorld):
    """Workers that always have batches, and learn until so many updates are made.

    Attributes:
        ages: of each applied gradient, in updates.
        sizes: batches of each update.
    """

    def __init__(
        self, policy: PolicyConfig, factors: Sequence[float], learner: Learner, *, updates: int, seed: int
    ) -> None:
        """`factors`: mean seconds of a batch of each worker."""
        self.ages: list[int] = []
        self.sizes: list[int] = []
        self._learner = learner

        def seconds(worker: int, batch: int) -> float:
            rng = np.random.default_rng((seed, worker, batch))
            return factors[worker] * float(rng.standard_gamma(_SHAPE)) / _SHAPE

        super().__init__(
            policy, num_workers=len(factors), on={}, seconds_of=seconds, batch_size=BATCH_SIZE,
            updates=updates, checkpoint_every_updates=UNBOUNDED,
        )  # fmt: skip

    def run(self, batches: int) -> None:
        """Learn. `batches`: as many as each worker has."""
        workers = range(len(self.processes))
        for worker in workers:
            self.start_process(worker).cached = 0
        for worker in workers:
            self._read(worker, batches)
        self.run_until()

    def perform(self, action: EngineAction) -> Event | None:
        if isinstance(action, Grant):
            self._learner.grant(action)
        if isinstance(action, ApplyUpdate):
            self._learner.apply(action)
            self.ages += [action.version - 1 - item.base_version for item in action.sets for _ in item.batches]
            self.sizes.append(sum(len(item.batches) for item in action.sets))
        return super().perform(action)


@dataclass(frozen=True)
class Row:
    """One run. `accuracy`: mean over the evaluations of the last third of its updates."""

    seconds: float
    samples: int
    accuracy: float
    mean_age: float
    oldest: int
    updates: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


def learn(
    policy: PolicyConfig, factors: Sequence[float], *, seed: int, samples: int, lr: float = 0.1, momentum: float = 0.9
) -> Row:
    """One run of the digits, to this number of samples."""
    count, workers = samples // BATCH_SIZE, len(factors)
    x, y = images.draw(*originals(), samples, np.random.default_rng(seed))

    def batches(worker: int, batch: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        at = (batch * workers + worker) % count * BATCH_SIZE
        return x[at : at + BATCH_SIZE], y[at : at + BATCH_SIZE]

    learner = Learner(
        Digits(), SgdConfig(lr=lr, momentum=momentum), batches, seed=seed, evaluate_every=_EVALUATE_EVERY,
        age_weight=policy.age_weight,
    )  # fmt: skip
    job = Job(policy, factors, learner, updates=count // policy.batches_per_update(workers), seed=seed)
    job.run(count)
    late = [error.accuracy or 0.0 for version, error in learner.errors if version > 2 / 3 * job.version]
    return Row(
        job.now, sum(job.sizes) * BATCH_SIZE, statistics.mean(late), statistics.mean(job.ages), max(job.ages),
        job.version,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowness", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--staleness", type=int, default=3)
    parser.add_argument("--samples", type=int, default=48_000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    table = Table(
        f"{asked.workers} workers, K = {asked.group_size}, {asked.samples:,} samples; means over seeds {asked.seeds}, "
        f"lr {asked.lr}, momentum {asked.momentum}",
        ("slowness of worker 0", "staleness", "samples/s", "times exact", "accuracy", "mean age", "oldest", "updates"),
    )
    for slowness in (asked.slowness, 1.0):
        factors = [slowness, *[1.0] * (asked.workers - 1)]
        exact = 0.0
        for staleness in (0, asked.staleness):
            policy = DollPolicyConfig(group_size=asked.group_size, staleness=staleness)
            rows = [
                learn(policy, factors, seed=seed, samples=asked.samples, lr=asked.lr, momentum=asked.momentum)
                for seed in seeds
            ]
            rate = statistics.mean(row.samples_per_s for row in rows)
            exact = exact or rate
            table.rows.append([
                f"{slowness:g}", f"{staleness}", f"{rate:.1f}", f"{rate / exact:.2f}",
                f"{statistics.mean(row.accuracy for row in rows):.4f}",
                f"{statistics.mean(row.mean_age for row in rows):.2f}", f"{max(row.oldest for row in rows)}",
                f"{statistics.mean(row.updates for row in rows):.0f}",
            ])  # fmt: skip
    print(table.text())


if __name__ == "__main__":
    main()
