"""A worker that steps itself: its view of the model is the newest weights that it has, plus its own steps that these do
not hold yet (the seed papers' read-my-writes; docs/decisions/0034)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.config import TrainingConfig
from doll.consumers.gradient import Gradient, GradientComputer
from doll.consumers.local_model import CachedVersion
from doll.consumers.residual import Residual
from doll.model import FlatModel
from doll.optim.contribution import Contribution
from doll.optim.optimizer import Optimizer
from doll.records import Grant, NewVersion
from doll.storage.blobs import Blobs


class _Step(NamedTuple):
    """What one batch has changed.

    Attributes:
        values: float32, shape (numel,): of parameters the change, of float buffers the value after the batch times its
            samples, of other buffers the bytes after the batch.
    """

    batch: int
    values: npt.NDArray[np.float32]


class StepModel:
    """`LocalModel` and `SetContribution` of a worker that runs the optimizer on its own view.

    The optimizer's state is this process's own: it begins anew with each process, and never crosses the wire.
    """

    def __init__(
        self, job: str, blobs: Blobs, training: TrainingConfig, model: FlatModel, computer: GradientComputer,
        *, takes_steps: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            computer: of `model`.
            takes_steps: what `add` takes are the task's own steps, and no gradients: the optimizer is not used.
        """
        self._weights = CachedVersion(job, blobs, computer)  # below the own steps
        self._model = model
        self._computer = computer
        self._optimizer = None if takes_steps else Optimizer(model, training.optimizer, training.clip_norm)
        self._takes_sum = training.reduction == "sum"
        self._term = -1
        self._pushed: deque[_Step] = deque()  # the weights that were fetched last do not hold them
        self._kept: deque[_Step] = deque()  # behind these, and not pushed
        self._residual = Residual(training.policy.filter_threshold, model.num_parameters)

    # --- LocalModel ---------------------------------------------------------------------------------------------------

    def offer(self, weights: NewVersion) -> None:
        self._weights.offer(weights)

    def load(self, grant: Grant) -> int | None:
        if grant.term != self._term:  # what was pushed to an earlier server is in its checkpoint, or computed again
            self._term = grant.term
            self._pushed.clear()
            self._kept.clear()
            self._residual.clear()
        if self._forget_from(grant.first):
            self._weights.forget()  # the replica holds a step that nobody will ever apply
        refreshed = self._weights.refresh(grant)
        if refreshed is None:
            return None
        if refreshed.is_new:
            while self._pushed and self._pushed[0].batch < refreshed.included:
                self._pushed.popleft()
            parameters = self._computer.weights[: self._model.num_parameters]
            for step in (*self._pushed, *self._kept):
                parameters += step.values[: self._model.num_parameters]
            self._residual.add_to(parameters)
        return refreshed.version

    def _forget_from(self, batch: int) -> bool:
        """Forget the steps of batch `batch` and later ones, which are computed again; whether there were any."""
        is_any = False
        for steps in (self._kept, self._pushed):
            while steps and steps[-1].batch >= batch:
                steps.pop()
                is_any = True
        self._residual.take_back(batch)
        return is_any

    # --- SetContribution ----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        pass  # what is kept belongs to the next push

    def add(self, gradient: Gradient, *, batch: int, num_samples: int) -> bool:
        """Step on the view, at the mean (or the sum) of the batch's gradient.

        Raises:
            DivergedError: a number of the view or of the optimizer's state is not finite.
        """
        n, weights = self._model.num_parameters, self._computer.weights
        step = np.empty_like(weights)
        step[:n] = weights[:n]
        step[n:] = gradient.values[n:]
        if self._optimizer is None:
            weights[:n] += gradient.values[:n]
        else:
            self._optimizer.apply([gradient.values], 1.0 if self._takes_sum else 1.0 / num_samples, num_samples)
        np.subtract(weights[:n], step[:n], out=step[:n])
        self._kept.append(_Step(batch, step))
        return True

    def keep(self) -> None:
        pass  # nothing of the gradient is kept

    @property
    def holds_back(self) -> bool:
        return self._residual.is_held

    def values(self) -> Contribution | None:
        if not self._kept:
            return None
        total, n = self._sum(), self._model.num_parameters
        batch = self._kept[-1].batch
        if self._residual.is_used:
            total = total.copy()
            self._residual.split(total[:n], self._computer.weights[:n], batch)
            self._pushed.append(_Step(batch, total))
        else:
            self._pushed += self._kept
        self._kept.clear()
        return total

    def rest(self, until: int) -> Contribution | None:
        if self._kept:
            return self.values()
        held = self._residual.flush(until)
        if held is None:
            return None
        # The buffers of its batches are pushed already: it names none, and has no samples.
        values = np.zeros_like(self._computer.weights)
        values[: self._model.num_parameters] = held
        return values

    def _sum(self) -> Contribution:
        total = self._kept[0].values
        if len(self._kept) > 1:
            floats = self._model.num_floats
            total = total.copy()
            for step in list(self._kept)[1:]:
                total[:floats] += step.values[:floats]
                total[floats:] = step.values[floats:]
        return total
