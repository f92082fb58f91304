"""Real learning in virtual time: the task's own model, gradients and updater inside the event simulation.

The system decides which batches make an update and when; what a batch contains depends on its worker and number only,
so that a batch that is lost and computed again is the same batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from doll.config import OptimizerConfig
from doll.consumers.compute.gradient import Gradient, GradientComputer
from doll.evaluation.heldout import HeldOut, HeldOutError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Optimizer
from doll.ps.engine.events import ApplyUpdate
from doll.ps.model.updater import ContributionBuffer
from doll.records.control import Grant
from doll.task.base import Task

# (worker, number of the batch) -> samples x of shape (b, ...), targets y of shape (b, ...)
Batches = Callable[[int, int], tuple[npt.NDArray[Any], npt.NDArray[Any]]]


class Learner:
    """Weights, optimizer and one gradient per grant; give it to `System` as `learner`.

    Attributes:
        version: updates applied.
        errors: (version, held-out error) every `evaluate_every` updates, from version 0 on.
    """

    def __init__(
        self, task: Task, optimizer: OptimizerConfig, batches: Batches, *, seed: int = 0, evaluate_every: int = 100,
        holdout_samples: int = 1000, age_weight: Callable[[int], float] = lambda age: 1.0,
    ) -> None:  # fmt: skip
        """
        Args:
            seed: of the first weights.
            age_weight: `PolicyConfig.age_weight`.
        """
        torch.manual_seed(seed)
        self._model = FlatModel(task.build_model())
        # One replica for all workers: a grant is of the current version, so its gradient can be computed at once.
        self._computer = GradientComputer(task, self._model)
        self._batches = batches
        self._contributions = ContributionBuffer(Optimizer(self._model, optimizer), age_weight=age_weight)
        self._gradients: dict[int, Gradient] = {}  # by grant
        self._held_out = HeldOut(task, holdout_samples)
        self._evaluate_every = evaluate_every
        self.version = 0
        self.errors: list[tuple[int, HeldOutError]] = []
        self._evaluate()

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """float32, shape (numel,), the live array."""
        return self._computer.weights

    @property
    def num_waiting(self) -> int:
        """Gradients that no update has taken."""
        return len(self._gradients)

    def grant(self, grant: Grant) -> None:
        """Compute the gradient of this grant.

        Raises:
            ValueError: the grant is of another version than the weights that are here.
        """
        if grant.version != self.version:
            raise ValueError(f"expected a grant of version {self.version}, got one of {grant.version}")
        for batch, number in enumerate(grant.grant_ids, grant.first):
            gradient = self._computer.compute(*self._batches(grant.worker, batch))
            self._gradients[number] = gradient._replace(vector=gradient.vector.clone())

    def drop(self, grant: Grant) -> None:
        """The worker is gone and its gradients with it."""
        for number in grant.grant_ids:
            del self._gradients[number]

    def apply(self, update: ApplyUpdate) -> None:
        """The parameter server's step on the sums of the workers."""
        for item in update.sets:
            total = self._computer.new_sum()
            for batch in item.push.batches:
                total.add(self._gradients.pop(batch.grant_id), batch=batch.batch)
            values = total.values()
            assert values is not None, "a set has a batch"
            self._contributions.put(item.grant_id, values)
        self._contributions.apply(update)
        self.version = update.version
        if self.version % self._evaluate_every == 0:
            self._evaluate()

    def _evaluate(self) -> None:
        self.errors.append((self.version, self._held_out.evaluate(self._model.module)))
