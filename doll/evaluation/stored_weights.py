"""The weights in a job's newest checkpoint, for readers such as the last evaluation and the export."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.config.fingerprint import REGRIDDABLE, parse, refused_changes
from doll.errors import CheckpointError
from doll.model.flat_model import FlatModel, fingerprint
from doll.optim.optimizer import AVERAGE, WEIGHTS
from doll.ps.tables.bounded_table import CheckpointRows, stored_bounded_rows
from doll.ps.tables.store import stored_rows
from doll.records.event_times import NO_EVENTS, EventSpan
from doll.records.rollbacks import Rollback
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import open_store
from doll.tables.bounds import InitialRows
from doll.tables.row_layers import RowLayers
from doll.tables.rows import Floats, Ids

_NO_LAYERS: Final[Mapping[str, RowLayers]] = {}


class Place(NamedTuple):
    """The term and number of a version. Versions of a later term are newer, even if their number is lower."""

    term: int
    version: int


class StoredWeights(NamedTuple):
    """The weights of one version, from a checkpoint or published: float32 of shape (numel,).

    Attributes:
        tables: all rows of each table, by name, float32, shape (num_rows, width).
        bounded: existing rows of each bounded table, by name.
        is_average: True if the weights are the moving average (`training.ema`).
        run_id: id of the run, as in `TermStarted`; "": not known.
        samples: number of usable samples that the version has learned from; -1: not known.
        layers: changed rows of each table, by name, which replace rows of `tables` and `bounded`.
        events: event times of the records that the version has learned; `NO_EVENTS`: not known.
    """

    version: int
    weights: npt.NDArray[np.float32]
    term: int
    fingerprint: str
    tables: Mapping[str, Floats]
    bounded: Mapping[str, CheckpointRows]
    is_average: bool = False
    run_id: str = ""
    samples: int = -1
    layers: Mapping[str, RowLayers] = _NO_LAYERS
    events: EventSpan = NO_EVENTS

    def load_into(self, model: FlatModel) -> None:
        """Load these weights and rows into `model`."""
        model.load_weights(self.weights)
        if model.tables is not None:
            initial = {name: bounds.initial for name, bounds in model.tables.bounds.items()}
            model.tables.connect(partial(self._look_up, initial))

    def _look_up(self, initial: Mapping[str, InitialRows], name: str, ids: Ids) -> Floats:
        if name in self.tables:
            values = self.tables[name][ids]
        else:
            values = initial[name].rows(ids)
            self.bounded[name].write_to(ids, values)
        if name in self.layers:
            self.layers[name].write_to(ids, values)
        return values


def place_of(stored: StoredWeights) -> Place:
    return Place(stored.term, stored.version)


def newest_weights(
    config: JobConfig,
    run_folder: Path,
    model: FlatModel,
    *,
    version: int | None = None,
    beside: tuple[int, int] | None = None,
    average: bool | None = None,
    in_place: bool = False,
) -> StoredWeights | None:
    """Return the newest checkpoint's weights; None if there is none, or its (term, version) is not above `beside`.

    Args:
        version: version of the checkpoint to read; None: the newest one.
        beside: (term, version) of the weights that the caller already has; None: the caller has none.
        average: whether to read the moving average instead of the weights. None: read it if the checkpoint has one.
        in_place: True: leave weights and rows in the checkpoint's file; see `CheckpointStore.load_newest`.

    Raises:
        CheckpointError: the checkpoint is of another job or model, or has no average; or all checkpoints are damaged;
            or there is no checkpoint of `version`.
    """
    store = open_store(config, run_folder)
    if beside is not None and (held := store.versions()) and held[-1] <= beside:
        return None
    mark = fingerprint(config, model)
    checkpoint = store.load_newest(mark if version is None else None, version, in_place=in_place)
    if checkpoint is None:
        return None
    # An earlier version may have another grid (`doll regrid`); but its model must be this one.
    if version is not None and (refused := refused_changes(parse(checkpoint.fingerprint), parse(mark), REGRIDDABLE)):
        raise CheckpointError(f"{store.location}: version {version} is of another model than the job file's: {refused}")
    return weights_of(checkpoint, model, average=average, location=store.location)


def weights_of(
    checkpoint: Checkpoint, model: FlatModel, *, average: bool | None = None, location: str = ""
) -> StoredWeights:
    """Return the weights and rows of a checkpoint.

    Args:
        average: as for `newest_weights`.
        location: location of the checkpoint, for messages.

    Raises:
        CheckpointError: the checkpoint has no average, or its tensors do not fit the model.
    """
    is_average = AVERAGE in checkpoint.tensors if average is None else average
    name = AVERAGE if is_average else WEIGHTS
    weights = checkpoint.tensors.get(name)
    if weights is None or weights.shape != (model.flat.numel(),):
        raise CheckpointError(
            f"{location}: expected {name!r} of shape ({model.flat.numel()},), got "
            f"{'nothing' if weights is None else weights.shape} in version {checkpoint.version}"
            + ("; training.ema keeps an average" if is_average else "")
        )
    tables, bounded = {}, {}
    if model.tables is not None:
        for name, shape in model.tables.shapes.items():
            if name in model.tables.bounds:
                bounded[name] = stored_bounded_rows(checkpoint.tensors, name, shape.width)
            else:
                tables[name] = stored_rows(checkpoint.tensors, name, shape)
    known = _decoded(checkpoint.state)
    return StoredWeights(
        checkpoint.version, weights, checkpoint.term, checkpoint.fingerprint, tables, bounded, is_average,
        known.run_id, known.samples_total, events=known.events,
    )  # fmt: skip


class _EngineState(msgspec.Struct):
    """The part of the engine's state that readers of weights need; see `doll.ps.engine.events.EngineSnapshot`."""

    run_id: str = ""
    samples_total: int = -1
    rollbacks: tuple[Rollback, ...] = ()
    events: EventSpan = NO_EVENTS


def rollbacks_in(state: bytes) -> tuple[Rollback, ...]:
    """Return the rollbacks in a checkpoint with this engine state, the oldest first."""
    return _decoded(state).rollbacks


def _decoded(state: bytes) -> _EngineState:
    try:
        return msgspec.msgpack.decode(state, type=_EngineState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _EngineState()
