"""The model of a worker that computes its own optimizer steps. The worker's view of the model consists of the newest
weights that it has, plus its own steps that these weights do not contain (read-my-writes in the seed papers;
docs/decisions/0034).

The model receives a share of each step if the policy averages its workers. The view has the whole step, because the
other workers are making steps of the same size that the view misses (docs/decisions/0123). Rows of tables have only the
share: few workers change the same row at the same time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.config import TrainingConfig
from doll.consumers.compute.gradient import CachedVersion, Gradient, GradientComputer
from doll.consumers.compute.weights_ahead import Deltas
from doll.consumers.protocol.grants import grant_id_of
from doll.consumers.tables.table_rows import WorkerTables
from doll.errors import IllegalEventError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Contribution, diverged
from doll.optim.recipe import make_optimizer
from doll.optim.significance_filter import Residual
from doll.optim.top_k import TopK
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import Blobs
from doll.tables.rows import Rows, add_in_order


class _Step(NamedTuple):
    """The change of the weights by one batch."""

    batch: int
    # float32, shape (numel,): for parameters the change, for float buffers the value after the batch times its weight,
    # for other buffers the bytes after the batch.
    values: npt.NDArray[np.float32] | None  # None: no sample was usable
    rows: Mapping[str, Rows]  # the changes of tables, by name, times `share`; the caches have them, too
    grant_id: int = 0
    absent: int = 0  # see `FlatModel.absent`
    share: float = 1.0  # factor of the parameters' change in the push


class StepModel:
    """The `LocalModel` and `SetContribution` of a worker that runs the optimizer on its own view.

    The optimizer's state belongs to this process: each process starts with a new state, which is never sent.
    """

    def __init__(
        self, job: str, blobs: Blobs, training: TrainingConfig, model: FlatModel, computer: GradientComputer,
        *, takes_steps: bool = False, rows: WorkerTables | None = None, background: Executor | None = None,
        deltas: Deltas | None = None, rounds: bool = False,
    ) -> None:  # fmt: skip
        """Create the model. If `takes_steps` is True, `add` receives the task's own steps instead of gradients, and the
        optimizer is not used. `rows` contains the rows of the model's tables and their optimizer; None: the model has
        no tables. `background`, `deltas`: see `CachedVersion`. `rounds`: see `Residual`."""
        self._weights = CachedVersion(job, blobs, computer, background, deltas)  # the view without the own steps
        self._model = model
        self._computer = computer
        # Rows of tables are clipped together with the rest.
        clips_here = rows is not None and training.clip_norm is not None
        self._optimizer = None if takes_steps else make_optimizer(training, model, clips_norm=not clips_here)
        self._clip_norm = training.clip_norm if clips_here and training.clip_norm is not None else math.inf
        self._rows = rows
        self._pushed_rows: Mapping[str, Rows] = {}
        self._tells_absent = training.policy.outer_step is not None  # otherwise the server only adds the contributions
        self.absent = 0
        self._takes_sum = training.reduction == "sum"
        self._policy = training.policy
        self._term = -1
        self._included = 0  # batches below this number are in published weights, with their steps
        self._pushed: deque[_Step] = deque()  # pushed, but not in the last fetched weights
        self._kept: deque[_Step] = deque()  # later steps, not pushed
        self._filters = rounds or training.policy.filter_threshold > 0
        self._sparse = training.policy.sparse_push
        self._top_k = None if self._sparse is None else TopK(self._sparse, model.num_parameters)
        self._residual = self._top_k or Residual(training.policy.filter_threshold, model.num_parameters, rounds=rounds)
        self._seen_times = 1.0  # factor of the residual in the view
        self._version = 0  # version of the published weights in the view
        self._grant: Grant | None = None  # the grant being computed
        self._holds: tuple[tuple[int, int], ...] = ()

    # --- LocalModel ---------------------------------------------------------------------------------------------------

    def offer(self, weights: NewVersion) -> None:
        self._weights.offer(weights)

    @property
    def delta_bytes(self) -> int:
        return self._weights.delta_bytes

    def load(self, grant: Grant) -> int | None:
        refreshed = self._weights.refresh(grant)
        if refreshed is None:
            return None
        self._version = refreshed.version
        if refreshed.is_new:
            self._included = max(self._included, refreshed.included)
            while self._pushed and self._pushed[0].batch < refreshed.included:
                self._pushed.popleft()
            parameters = self._computer.weights[: self._model.num_parameters]
            for step in (*self._pushed, *self._kept):
                if step.values is not None:
                    parameters += step.values[: self._model.num_parameters]
            if self._top_k is None:
                self._residual.add_to(parameters)
            elif self._sparse is not None and (held := self._top_k.below(self._included)) is not None:
                # This is without the part of the steps above. All workers hold similar changes back, which only they
                # see. So the worker sees its own as if the others had held back the same.
                self._seen_times = 1 / self._sparse.factor(grant.num_live)
                parameters += np.float32(self._seen_times) * held
        # If a later process of this worker has replaced this one, these weights may already contain the batch.
        return refreshed.version if grant.first >= self._included else None

    def _forget_from(self, batch: int) -> bool:
        """Forget the steps of `batch` and of later batches, because these batches are computed again. Return whether
        any step was forgotten."""
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

    @property
    def holds(self) -> tuple[tuple[int, int], ...]:
        return self._holds

    def begin(self, grant: Grant) -> bool:
        if grant.term != self._term:  # steps pushed to an earlier server are in its checkpoint, or computed again
            self._term, self._included = grant.term, 0
            self._pushed.clear()
            self._kept.clear()
            self._forget_rest()
        self._included = max(self._included, grant.included)
        if grant.first < self._included:
            return False
        self._grant = grant
        if self._forget_from(grant.first):
            self._weights.forget()  # the replica contains a step that will never be applied
        return True

    def add(self, gradient: Gradient, *, batch: int) -> bool:
        """Make a step on the view with the mean (or the sum) of the batch's gradient.

        The push of the optimizer's step is divided by the number of live workers if the policy averages them
        (`PolicyConfig.share`). A task's own step is added whole: only the task knows its size, and steps such as the
        counts of a topic model must not be divided.

        Raises:
            DivergedError: a number of the view or of the optimizer's state is not finite.
            BlobError: the rows that the step changes have not arrived.
            IllegalEventError: the step of this batch or of a later batch was already made.
        """
        self._expect_later(batch)
        scale = 1.0 if self._takes_sum else 1.0 / gradient.weight
        if (norm := scale * gradient.norm) > self._clip_norm:
            scale *= self._clip_norm / norm
        num_live = 1 if self._grant is None else self._grant.num_live
        share = 1.0 if self._optimizer is None else self._policy.share(num_live)
        rows = self._step_rows(gradient.rows, scale, batch, share)
        n, weights, values = self._model.num_parameters, self._computer.weights, gradient.values
        step = np.empty_like(weights)
        step[:n] = weights[:n]
        step[n:] = values[n:]
        if self._optimizer is None:
            weights[:n] += values[:n]
        else:
            self._optimizer.go_to(self._version)
            self._optimizer.apply([values], scale, gradient.weight, absent=gradient.absent)
        np.subtract(weights[:n], step[:n], out=step[:n])
        self._kept.append(_Step(batch, step, rows, grant_id_of(self._grant, batch), gradient.absent, share))
        return True

    def skip(self, batch: int) -> None:
        self._expect_later(batch)
        self._kept.append(_Step(batch, None, {}, grant_id_of(self._grant, batch)))

    def _expect_later(self, batch: int) -> None:
        steps = self._kept or self._pushed
        if steps and batch <= steps[-1].batch:
            raise IllegalEventError(f"expected a batch after {steps[-1].batch}, got {batch}: its step has been made")

    def _step_rows(self, gradients: Mapping[str, Rows], scale: float, batch: int, share: float) -> Mapping[str, Rows]:
        if self._rows is None:
            return {}
        steps = gradients if self._optimizer is None else self._rows.step(gradients, scale)
        if share != 1:
            steps = {name: Rows(rows.ids, np.float32(share) * rows.values) for name, rows in steps.items()}
        if not all(np.isfinite(rows.values).all() for rows in steps.values()):
            raise diverged("after the step the rows of a table are")
        self._rows.inc(steps)
        return self._rows.close(batch)

    def keep(self) -> None:
        pass  # no part of the gradient is kept

    @property
    def holds_back(self) -> bool:
        return self._residual.is_held or (self._rows is not None and self._rows.holds_back)

    def values(self, *, whole: bool = False) -> Contribution | None:
        """Return the sum of the kept steps as it is pushed. `whole`: with all that is held back."""
        steps = list(self._kept)
        self._kept.clear()
        self._holds = tuple((step.batch, step.grant_id) for step in steps)
        names = sorted({name for step in steps for name in step.rows})
        self._pushed_rows = {
            name: add_in_order([step.rows[name] for step in steps if name in step.rows]) for name in names
        }
        made = [step.absent for step in steps if step.values is not None]
        self.absent = reduce(and_, made) if made and self._tells_absent else 0
        n = self._model.num_parameters
        if self._sparse is not None:
            factor = np.float32(self._sparse.factor(1 if self._grant is None else self._grant.num_live))
            for values in (step.values for step in steps if step.values is not None):
                values[:n] *= factor
            self._weights.forget()  # in the replica, the steps do not have this factor
        total = self._sum(steps)
        if total is None:
            return None
        if self._top_k is not None:
            total = total.copy()
            self._top_k.send(total[:n], steps[-1].batch, included=self._included, whole=whole)
        if self._filters:
            total, batch = total.copy(), steps[-1].batch
            if self._residual.is_used:
                # A change is significant by the whole step, so its share is compared with a share of the weights.
                weights = np.float32(steps[-1].share) * self._computer.weights[:n]
                self._residual.split(total[:n], weights, batch, self._version)
            if self._rows is not None:
                self._pushed_rows = self._rows.filter(self._pushed_rows, batch, self._version)
            self._pushed.append(_Step(batch, total, {}))
        else:
            self._pushed += (step._replace(rows={}) for step in steps)
        return total

    def rows(self) -> Mapping[str, Rows]:
        rows, self._pushed_rows = self._pushed_rows, {}
        return rows

    def rest(self, until: int) -> Contribution | None:
        if self._kept and not (until and self._sparse is not None):  # what is held back counts, and they do not yet
            return self.values(whole=True)
        self._holds, self.absent = (), 0
        held = self._residual.below(until) if until else None
        self._pushed_rows = {} if self._rows is None else self._rows.rest(until)
        if held is None and not self._pushed_rows:
            return None
        # The buffers of its batches were already pushed: the rest names no batch and has no samples.
        values = np.zeros_like(self._computer.weights)
        if held is not None:
            values[: self._model.num_parameters] = held
        return values

    def rest_stored(self) -> None:
        if not self._holds:
            self._forget_rest()

    def _forget_rest(self) -> None:
        self._residual.clear()
        if self._rows is not None:
            self._rows.clear_rest()

    def _sum(self, steps: Sequence[_Step]) -> Contribution | None:
        """Return the sum of the steps, each times its share."""
        made = [(step.values, step.share) for step in steps if step.values is not None]
        if len(made) < 2 and all(share == 1 for _, share in made):
            return made[0][0] if made else None
        n, floats = self._model.num_parameters, self._model.num_floats
        total = np.zeros_like(self._computer.weights)
        for values, share in made:
            total[:n] += np.float32(share) * values[:n]
            total[n:floats] += values[n:floats]
            total[floats:] = values[floats:]
        return total
