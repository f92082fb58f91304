"""Steps of a matrix factorisation in the simulated network: what each worker sees, numerically. Pure."""

from __future__ import annotations

import numpy as np
from doll.ps.engine.events import ApplyUpdate

from benchmarks.paper.factorization import Factorization, Floats


class FactorSteps:
    """Additive steps of workers that each draw from their shard; a worker sees its own steps at once.

    Attributes:
        parameters: of the server, float64, shape (num_parameters,).
        version: updates applied.
        losses: (version, mean squared error of all observed entries) every `evaluate_every` versions.
        included: of each worker, batches in `parameters`.
    """

    def __init__(
        self, problem: Factorization, *, workers: int, share: float, rate: float, seed: int,
        evaluate_every: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            share: of its shard, which a worker draws for a batch, without replacement.
            rate: a step is this, times the sum of the gradients.
            seed: of the first parameters and of the draws.
        """
        self._problem = problem
        self._shards = problem.shards(workers)
        self._share, self._rate, self._seed = share, rate, seed
        self.parameters: Floats = problem.start(0.3, np.random.default_rng((seed, 3)))
        self.version = 0
        self.losses: list[tuple[int, float]] = []
        self._evaluate_every = evaluate_every
        self.included = [0] * workers
        self._published: dict[int, tuple[Floats, tuple[int, ...]]] = {}
        self._own: list[dict[int, Floats]] = [{} for _ in range(workers)]
        self._steps: dict[tuple[int, int], Floats] = {}  # that the server has not added
        self._dropped = [0] * workers  # of each worker, its steps below are in every version that it reads from now on

    @property
    def mse(self) -> float:
        """Of all observed entries at the server; infinite where the parameters have diverged."""
        return self._problem.mse(self.parameters)

    def publish(self, version: int) -> None:
        """
        Raises:
            ValueError: the server has another version.
        """
        if version in self._published:
            return
        if version != self.version:
            raise ValueError(f"expected version {self.version} to be published, got {version}")
        self._published[version] = (self.parameters.copy(), tuple(self.included))

    def view(self, worker: int, version: int) -> Floats:
        """A published version and the worker's steps that it does not hold, shape (num_parameters,)."""
        weights, included = self._published[version]
        own = self._own[worker]
        for batch in range(self._dropped[worker], included[worker]):
            del own[batch]
        self._dropped[worker] = max(self._dropped[worker], included[worker])
        with np.errstate(over="ignore", invalid="ignore"):
            return weights + np.sum(list(own.values()), axis=0) if own else weights.copy()

    def compute(self, worker: int, batch: int, version: int) -> float:
        self._own[worker].pop(batch, None)  # where it is computed again
        step = self.step(worker, batch, self.view(worker, version))
        self._own[worker][batch] = step
        self._steps[worker, batch] = step
        most = float(np.max(np.abs(step)))
        return most if np.isfinite(most) else 0.0

    def step(self, worker: int, batch: int, view: Floats) -> Floats:
        """What this batch adds, shape (num_parameters,)."""
        shard = self._shards[worker]
        rng = np.random.default_rng((self._seed, 4, worker, batch))
        picked = rng.choice(shard, round(self._share * len(shard)), replace=False)
        with np.errstate(over="ignore", invalid="ignore"):
            return -self._rate * self._problem.gradient(view, picked)[0]

    def apply(self, update: ApplyUpdate) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            for item in update.sets:
                for batch in item.push.batches:
                    self.parameters += self._steps.pop((item.push.worker, batch.batch))
                    self.included[item.push.worker] = batch.batch + 1
        self.version = update.version
        if self._evaluate_every is not None and self.version % self._evaluate_every == 0:
            self.losses.append((self.version, self.mse))
