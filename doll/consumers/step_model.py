"""A worker that steps itself: its view of the model is the newest weights that it has, plus its own steps that these do
not hold yet (the seed papers' read-my-writes; docs/decisions/0034)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.config import TrainingConfig
from doll.consumers.gradient import Gradient, GradientComputer
from doll.consumers.local_model import CachedVersion
from doll.consumers.residual import Residual
from doll.consumers.row_steps import RowSteps
from doll.consumers.table_rows import TableRows
from doll.model import FlatModel
from doll.optim.contribution import Contribution
from doll.optim.optimizer import Optimizer, diverged
from doll.optim.row_optimizer import row_optimizer
from doll.records import Grant, NewVersion
from doll.rows import Rows, add_in_order
from doll.storage.blobs import Blobs


class _Step(NamedTuple):
    """What one batch has changed.

    Attributes:
        values: float32, shape (numel,): of parameters the change, of float buffers the value after the batch times its
            samples, of other buffers the bytes after the batch.
        rows: of tables the change, by name; the caches hold it as well.
    """

    batch: int
    values: npt.NDArray[np.float32]
    rows: Mapping[str, Rows]


class StepModel:
    """`LocalModel` and `SetContribution` of a worker that runs the optimizer on its own view.

    The optimizer's state is this process's own: it begins again with each process, and never crosses the wire.
    """

    def __init__(
        self, job: str, blobs: Blobs, training: TrainingConfig, model: FlatModel, computer: GradientComputer,
        *, takes_steps: bool = False, rows: TableRows | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            computer: of `model`.
            takes_steps: what `add` takes are the task's own steps, and no gradients: the optimizer is not used.
            rows: of the model's tables; None: it has none.

        Raises:
            ConfigError: an optimizer that cannot be used for tables.
        """
        self._weights = CachedVersion(job, blobs, computer)  # below the own steps
        self._model = model
        self._computer = computer
        # Rows of tables are clipped together with the rest.
        clips_here = rows is not None and training.clip_norm is not None
        self._optimizer = (
            None if takes_steps else Optimizer(model, training.optimizer, None if clips_here else training.clip_norm)
        )
        self._clip_norm = training.clip_norm if clips_here and training.clip_norm is not None else math.inf
        self._rows = rows
        self._row_steps = (
            {}
            if model.tables is None
            else {
                name: RowSteps(shape.width, row_optimizer(training.optimizer))
                for name, shape in model.tables.shapes.items()
            }
        )
        self._pushed_rows: Mapping[str, Rows] = {}
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
        if self._rows is not None:
            self._rows.take_back(batch)
        return is_any

    # --- SetContribution ----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        pass  # what is kept belongs to the next push

    def add(self, gradient: Gradient, *, batch: int, num_samples: int) -> bool:
        """Step on the view, at the mean (or the sum) of the batch's gradient.

        Raises:
            DivergedError: a number of the view or of the optimizer's state is not finite.
            BlobError: the rows that are to be changed have not come.
        """
        scale = 1.0 if self._takes_sum else 1.0 / num_samples
        if (norm := scale * gradient.norm) > self._clip_norm:
            scale *= self._clip_norm / norm
        rows = self._step_rows(gradient.rows, scale, batch)
        n, weights = self._model.num_parameters, self._computer.weights
        step = np.empty_like(weights)
        step[:n] = weights[:n]
        step[n:] = gradient.values[n:]
        if self._optimizer is None:
            weights[:n] += gradient.values[:n]
        else:
            self._optimizer.apply([gradient.values], scale, num_samples)
        np.subtract(weights[:n], step[:n], out=step[:n])
        self._kept.append(_Step(batch, step, rows))
        return True

    def _step_rows(self, gradients: Mapping[str, Rows], scale: float, batch: int) -> Mapping[str, Rows]:
        if self._rows is None:
            return {}
        seen = {name: self._rows.look_up(name, rows.ids) for name, rows in gradients.items()}
        steps = {name: self._row_steps[name].step(seen[name], rows, scale) for name, rows in gradients.items()}
        if not all(np.isfinite(rows.values).all() for rows in steps.values()):
            raise diverged("after the step the rows of a table are")
        self._rows.inc(steps)
        return self._rows.close(batch)

    def keep(self) -> None:
        pass  # nothing of the gradient is kept

    @property
    def holds_back(self) -> bool:
        return self._residual.is_held

    def values(self) -> Contribution | None:
        if not self._kept:
            return None
        names = sorted({name for step in self._kept for name in step.rows})
        self._pushed_rows = {
            name: add_in_order([step.rows[name] for step in self._kept if name in step.rows]) for name in names
        }
        total, n = self._sum(), self._model.num_parameters
        batch = self._kept[-1].batch
        if self._residual.is_used:
            total = total.copy()
            self._residual.split(total[:n], self._computer.weights[:n], batch)
            self._pushed.append(_Step(batch, total, {}))
        else:
            self._pushed += (step._replace(rows={}) for step in self._kept)
        self._kept.clear()
        return total

    def rows(self) -> Mapping[str, Rows]:
        rows, self._pushed_rows = self._pushed_rows, {}
        return rows

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
