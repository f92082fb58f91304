"""The parts of the model at the server, and the buffer of contributions to the model's next version."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.config import TrainingConfig
from doll.metrics.states import combined, from_bytes
from doll.model.flat_model import FlatModel
from doll.model.model_slice import ModelSlice
from doll.optim.optimizer import Contribution, FlatVector, OuterOptimizer, StepAdder, Updater
from doll.optim.recipe import decay, make_optimizer
from doll.optim.row_optimizer import row_optimizers
from doll.ps.engine.events import ApplyUpdate
from doll.ps.tables.bounded_table import BoundedTable
from doll.ps.tables.store import TableStore
from doll.tables.rows import Rows

_NO_ROWS: Final[Mapping[str, Rows]] = {}


class _WaitingSet(NamedTuple):
    values: Contribution
    rows: Mapping[str, Rows]
    number: int  # number of the set: its first grant id


class ContributionBuffer:
    """The contributions that wait for their update, and the step that makes a version from them.

    Contributions are added in the order of the update, whatever the order of their arrival. A contribution that arrives
    in order is added at once, which frees its memory; any other contribution waits (docs/decisions/0029).
    """

    def __init__(
        self, updater: Updater, tables: TableStore | None = None, age_weight: Callable[[int], float] = lambda age: 1.0
    ) -> None:
        """
        Args:
            tables: the tables of the model, changed together with the weights; None: it has no tables.
            age_weight: `PolicyConfig.age_weight`; not for sets that are added in order, whose ages are equal.
        """
        self._updater = updater
        self._tables = tables
        self._age_weight = age_weight
        self._waiting: dict[int, _WaitingSet] = {}
        self._added: list[int] = []  # sets whose contributions are already in the updater's sum, in order

    def __len__(self) -> int:
        return len(self._waiting) + len(self._added)

    def put(
        self, grant_id: int, contribution: Contribution, *, rows: Mapping[str, Rows] = _NO_ROWS, in_order: bool = False
    ) -> None:
        """Keep the sum of the set whose first grant is `grant_id` until its update comes. The sum is not copied.

        Args:
            rows: the set's contributions to tables, by name.
            in_order: True if all lower-numbered sets of the update have arrived and this set will be applied. Then the
                sum is added now, and its memory is not used after the call.
        """
        if not in_order:
            self._waiting[grant_id] = _WaitingSet(contribution, rows, grant_id)
            return
        for earlier in sorted(number for number in self._waiting if number < grant_id):
            self._add(self._waiting.pop(earlier))
        self._add(_WaitingSet(contribution, rows, grant_id))

    def add_waiting(self, grant_id: int) -> None:
        """Add the sum of a set that `put` has kept: it is `in_order` now."""
        waiting = self._waiting.pop(grant_id)
        self.put(grant_id, waiting.values, rows=waiting.rows, in_order=True)

    def drop(self, grant_id: int) -> None:
        """Forget the sum of this set, because its update will never come."""
        del self._waiting[grant_id]

    def apply(self, update: ApplyUpdate, into: npt.NDArray[np.float32] | None = None) -> int:
        """Make the version of `update`, and return the number of samples it has learned from.

        Args:
            into: memory for the new weights; see `Updater.apply`.

        Raises:
            DivergedError: see `Updater.apply`.
            KeyError: `put` was never called for a push of the update.
            RuntimeError: a contribution that was already added is not in the update, or is out of order.
        """
        added, self._added = deque(self._added), []
        contributions: list[_WaitingSet] = []
        ages = [update.version - 1 - item.base_version for item in update.sets]
        for item, age, factor in zip(update.sets, ages, self._age_factors(update, ages), strict=True):
            if added and item.grant_id == added[0] and not contributions:
                added.popleft()
            elif (waiting := self._waiting.pop(item.grant_id, None)) is not None:
                contributions.append(self._weighed(waiting, factor * self._updater.weight(item.weight, age)))
            elif item.push.key:
                raise KeyError(f"update {update.version}: expected the gradient of grant {item.grant_id}, got none")
        if added:
            raise RuntimeError(
                f"update {update.version}: expected the gradients that were added to be its first ones, in its order; "
                f"got that of grant {added[0]}"
            )
        weight = sum(item.weight for item in update.sets)
        if self._tables is not None:
            for waiting in contributions:
                self._tables.add(waiting.rows, waiting.number)
        if self._updater.metric is not None:
            self._updater.measure(*measured(update, self._updater.metric))
        # The weights come before the tables, because their update computes the factor by which both are clipped.
        self._updater.apply(
            [waiting.values for waiting in contributions], update.scale, weight, into, _absent(update),
            update.lr_factor, update.ema_factor,
        )  # fmt: skip
        if self._tables is not None:
            scale = update.scale * self._updater.clipped_by
            authors = self._authors(update) if scale == 1 else {}
            self._tables.apply(scale, update.version, authors, update.lr_factor)
        return sum(item.num_samples for item in update.sets)

    def _authors(self, update: ApplyUpdate) -> dict[int, int]:
        """Return the author numbers of the update's sets, except rests: a worker does not keep sent rests."""
        authors = None if self._tables is None else self._tables.authors
        if authors is None:
            return {}
        pushes = {item.grant_id: item.push for item in update.sets if item.push.batches}
        return {number: authors.number(push.worker, push.session) for number, push in pushes.items()}

    def _age_factors(self, update: ApplyUpdate, ages: Sequence[int]) -> list[float]:
        """Return the factor of each set by its age. Their mean over all samples is 1."""
        weights = [self._age_weight(age) for age in ages]
        total = sum(item.weight for item in update.sets)
        weighed = sum(weight * item.weight for weight, item in zip(weights, update.sets, strict=True))
        return [weight * total / weighed if weighed else 1.0 for weight in weights]

    def _weighed(self, waiting: _WaitingSet, weight: float) -> _WaitingSet:
        factor = np.float32(weight)
        if factor == 1:
            return waiting
        values = waiting.values.copy()
        values[: self._updater.num_parameters] *= factor
        rows = {name: Rows(rows.ids, rows.values * factor) for name, rows in waiting.rows.items()}
        return waiting._replace(values=values, rows=rows)

    def _add(self, waiting: _WaitingSet) -> None:
        self._updater.add(waiting.values)
        if self._tables is not None:
            self._tables.add(waiting.rows, waiting.number)
        self._added.append(waiting.number)


def measured(update: ApplyUpdate, metric: str) -> tuple[float, float]:
    """Return the weighted sum of a metric, or `loss`, over the samples of an update, and the sum of their weights. Sets
    without the metric do not count. A metric that is a state counts with its value over all sets."""
    parts: list[tuple[dict[str, float | bytes], float]] = []
    weight = 0.0
    for item in update.sets:
        sums = [batch.loss_sum if metric == "loss" else batch.metric_sums.get(metric) for batch in item.push.batches]
        if item.weight and None not in sums:
            parts += [({metric: value}, 0.0) for value in sums if value is not None]
            weight += item.weight
    values, _ = combined([*parts, ({}, weight)])
    value = values.get(metric)
    if isinstance(value, bytes):
        try:
            value = from_bytes(value).compute()
        except Exception:  # a damaged state, or the code of a user's class
            value = None
    return (0.0, 0.0) if value is None or not math.isfinite(value) else (value * weight, weight)


def _absent(update: ApplyUpdate) -> int:
    """Return a bit mask of the parameters that no contribution of the update has used."""
    named = [int.from_bytes(item.push.absent, "little") for item in update.sets if item.push.key]
    return reduce(and_, named) if named else 0


class ModelParts(NamedTuple):
    """The model at the server: the updater of its flat vector, and its tables, if it has any."""

    updater: Updater
    tables: TableStore | None = None

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        tensors = self.updater.tensors()
        return tensors if self.tables is None else tensors | self.tables.tensors()

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self.updater.load(tensors)
        if self.tables is not None:
            self.tables.load(tensors)


def make_parts(config: TrainingConfig, model: FlatModel, part: ModelSlice | None = None) -> ModelParts:
    """Make the parts for the section `training`. They take over the weights and the table rows of `model`, or those of
    `part`, its slice in a shard. Raises ConfigError if an optimizer cannot be made, or cannot be used for
    tables."""
    vector: FlatVector = model if part is None else part
    tables = None
    if model.tables is not None:
        optimizers = None if config.policy.sends_steps else row_optimizers(config, model.tables.shapes)
        bounded = {
            name: BoundedTable(
                name, model.tables.shapes[name], bounds, optimizers[name], model.tables.first_rows.pop(name, None)
            )
            for name, bounds in model.tables.bounds.items()
            if optimizers is not None
        }
        initial = model.tables.take_initial()
        if part is not None:
            initial = {name: part.rows.values(values) for name, values in initial.items()}
        tables = TableStore(initial, optimizers, bounded, is_slice=part is not None)
    if (outer := config.policy.outer_step) is not None:
        return ModelParts(OuterOptimizer(vector, outer, decay(config)), tables)
    if config.policy.sends_steps:
        return ModelParts(StepAdder(vector, ema=decay(config)), tables)
    norm = (lambda: 0.0) if tables is None else tables.norm
    return ModelParts(make_optimizer(config, vector, norm_of_tables=norm), tables)
