"""The part of `doll regrid` that changes the checkpoint store: it saves the newest checkpoint again with another grid.

A grid determines which offsets a batch number means, and how workers compute a batch: batch size, policy, optimizer.
The model continues, and its version, its origins in the ledger, its dead letters and its run id do not change. The
batches of a checkpoint are the first ones of each partition. Their whole steps are in the model, and their update
records are in Kafka. So the next grid begins at the offset after the last of these batches. All later updates are void,
as after any restart (docs/decisions/0085).

Order of effects: 1. The arguments are checked. 2. A term is claimed, which fences every server of the old grid. 3. The
newest checkpoint is loaded; no server can add a checkpoint after the claim. 4. The checkpoint is saved under the new
term, as one file or object. After a crash before step 4 the job has the old grid; after a later crash, the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy.typing as npt
import torch

from doll.config import JobConfig
from doll.config.fingerprint import MAY_CHANGE, REGRIDDABLE, differences, is_among, parse, refused_changes
from doll.errors import CheckpointError, ConfigError
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.optim.optimizer import AVERAGE, WEIGHTS
from doll.optim.recipe import check_recipe
from doll.process.fault_points import fault_point
from doll.ps.checkpointing import decode_snapshot, encode_snapshot
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import EngineSnapshot
from doll.ps.model.updater import make_parts
from doll.ps.policies import make_policy
from doll.ps.start import engine_settings
from doll.ps.tables.bounded_table import renumbered
from doll.ps.tables.store import stored_rows
from doll.records.bounds import Grid
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.task.base import load_task
from doll.telemetry import get_logger

log = get_logger(__name__)

_OPTIMIZERS: Final = ("training.optimizer.", "training.tables.")
_SCHEDULE: Final = "training.schedule"
_POLICY: Final = "training.policy.name"
_GRADIENTS: Final = "gradients"
_MAY_CHANGE: Final = tuple(item for item in MAY_CHANGE if item.startswith(_OPTIMIZERS))


@dataclass(frozen=True)
class RegridOutcome:
    """The outcome of a regrid.

    Attributes:
        grid: number of the new grid, which is the number of regrids of the job.
        origins: offset of the first batch of each partition.
        changes: changes of the job file, as text.
        optimizer_state: text that says whether the optimizer's state was kept.
    """

    job: str
    version: int
    term: int
    grid: int
    origins: tuple[int, ...]
    records_per_batch: int
    changes: str
    optimizer_state: str

    def text(self) -> str:
        return (
            f"regridded {self.job} at version {self.version}: batches of {self.records_per_batch} records from offsets "
            f"{', '.join(map(str, self.origins))} on ({self.changes})\n"
            f"  the weights are kept; {self.optimizer_state}"
        )


def regrid(
    config: JobConfig, store: CheckpointStore, *, above_term: int = 0, checked: Callable[[], object] = lambda: None
) -> RegridOutcome:
    """Begin the grid of `config` at the newest checkpoint of `store`. No server may serve the job during this call.

    Args:
        above_term: highest term that is known from elsewhere.
        checked: function that is called after all checks and before the first change.

    Raises:
        ConfigError: there is no checkpoint, `config` changes what a regrid cannot change, or its model cannot be built.
        CheckpointError: the store cannot be read or written, or its checkpoint does not fit.
        FencedError: a server has claimed the job during this call. The job continues with the old grid.
    """
    torch.set_num_threads(1)
    _begin(config, store, term=0)
    checked()
    term = store.claim_term(above_term)
    fault_point("regrid.after_claim")
    checkpoint, result = _begin(config, store, term=term)
    store.save(checkpoint)
    fault_point("regrid.after_checkpoint")
    log.info("regridded", version=result.version, term=term, grid=result.grid, changes=result.changes)
    return result


def _begin(config: JobConfig, store: CheckpointStore, *, term: int) -> tuple[Checkpoint, RegridOutcome]:
    """Return the checkpoint that begins the new grid, unsaved. It has passed the checks of the next server."""
    before = store.load_newest(None, in_place=True)
    if before is None:
        raise ConfigError(
            f"no checkpoint of job {config.job} in {store.location}: expected one to go on from; if the job has not "
            "begun, edit its job file and start it"
        )
    state = regridded(decode_snapshot(before), config.data.records_per_batch, config.training.policy.name)
    checkpoint, optimizer_state = converted(config, store, before, state, term=term, command="doll regrid")
    saved, wanted = parse(before.fingerprint), parse(checkpoint.fingerprint)
    if not differences(saved, wanted):
        raise ConfigError(
            f"{store.location}: expected another batch size, policy, optimizer or number of workers than before, got "
            "the same: the job goes on without a regrid"
        )
    return checkpoint, RegridOutcome(
        config.job, before.version, term, len(state.earlier_grids), state.origins, state.records_per_batch,
        _changes(saved, wanted), optimizer_state,
    )  # fmt: skip


def converted(
    config: JobConfig, store: CheckpointStore, before: Checkpoint, state: EngineSnapshot, *, term: int, command: str
) -> tuple[Checkpoint, str]:
    """Return a checkpoint of `state` with the model of `before` under the settings of `config`, and a text that says
    whether the optimizer's state was kept. The checkpoint is not saved. It has passed the checks of the next server.
    `command`: name of the command, for error messages.

    Raises:
        ConfigError: `config` changes what a new grid cannot change, or its model cannot be built.
        CheckpointError: `before` does not fit.
    """
    model = build(config, load_task(config))
    check_recipe(config.training, model)
    mark = fingerprint(config, model)
    saved, wanted = parse(before.fingerprint), parse(mark)
    if refused := refused_changes(saved, wanted, REGRIDDABLE):
        raise ConfigError(f"{store.location}: {command} cannot change this: {refused}; undo it, or begin a new job")
    why_new = _why_new(saved, wanted)
    bounded = () if model.tables is None else tuple(model.tables.bounds)
    if why_new and bounded:
        raise ConfigError(
            f"{command}: expected the same optimizer, settings of tables and kind of pushes for a model with bounded "
            f"tables ({', '.join(bounded)}), whose rows are kept with their state; got {why_new}"
        )
    tensors = _tensors(config, model, before, keep_state=not why_new)
    for name in bounded:
        tensors |= renumbered(tensors, name, state.version - before.version)
    checkpoint = Checkpoint(
        job=config.job, fingerprint=mark, term=term, version=state.version, state=encode_snapshot(state),
        tensors=tensors, layout=model.layout, code=before.code, chain=before.chain,
    )  # fmt: skip
    _require_fit(config, before, state)
    return checkpoint, _optimizer_state(config, why_new)


def closed(snapshot: EngineSnapshot) -> Grid:
    """Return the grid of `snapshot` as an earlier grid, which ends with the applied batches of `snapshot`."""
    return Grid(
        version=snapshot.version, records_per_batch=snapshot.records_per_batch, origins=snapshot.origins,
        applied=snapshot.applied, left_out=snapshot.left_out,
    )  # fmt: skip


def regridded(snapshot: EngineSnapshot, records_per_batch: int, policy: str) -> EngineSnapshot:
    """Return the same state in a new grid, whose batches begin where the batches of `snapshot` end. Pure."""
    grid = closed(snapshot)
    return msgspec.structs.replace(
        snapshot,
        records_per_batch=records_per_batch,
        origins=grid.ends,
        applied=(0,) * len(grid.origins),
        left_out=(),
        by_worker=(0,) * len(snapshot.sessions),
        policy=policy,
        policy_state=None,  # clocks count batches, and batches are counted from 0 again
        earlier_grids=(*snapshot.earlier_grids, grid),
    )


def _require_fit(config: JobConfig, before: Checkpoint, state: EngineSnapshot) -> None:
    """Raise CheckpointError if the next server would refuse this state."""
    try:
        Engine(engine_settings(config), make_policy(config.training.policy), term=0, now=0.0, snapshot=state)
    except ValueError as exc:
        raise CheckpointError(f"version {before.version} of job {before.job!r}: {exc}") from exc


def _tensors(
    config: JobConfig, model: FlatModel, before: Checkpoint, *, keep_state: bool
) -> dict[str, npt.NDArray[Any]]:
    """Return the weights, the table rows and, if `keep_state` is True, the optimizer's state."""
    if not keep_state:
        try:
            model.load_weights(before.tensors[WEIGHTS])
        except (KeyError, ValueError) as exc:
            raise CheckpointError(f"version {before.version} of job {before.job!r}: {exc}") from exc
        if model.tables is not None:
            for name, shape in model.tables.shapes.items():
                model.tables.initial_rows(name)[:] = stored_rows(before.tensors, name, shape)
    parts = make_parts(config.training, model)
    if keep_state:
        parts.load(before.tensors)
    tensors = parts.tensors()
    if AVERAGE in tensors and AVERAGE in before.tensors:  # the moving average depends only on the weights
        tensors[AVERAGE] = before.tensors[AVERAGE]
    return tensors


def _why_new(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return why the stored optimizer state does not fit the new settings; "" if it fits."""
    before, now = saved.get("pushes", _GRADIENTS), wanted["pushes"]
    if (before == _GRADIENTS) != (now == _GRADIENTS):
        return f"workers push {now}, before {before}"
    if now != _GRADIENTS:
        keys = {_POLICY}
    else:
        may_change = () if _SCHEDULE in saved else _MAY_CHANGE  # a schedule has set the rates in the stored state
        of_optimizer = {key for key in {**saved, **wanted} if key.startswith(_OPTIMIZERS)}
        keys = {key for key in of_optimizer if not is_among(key, may_change)} | {_SCHEDULE}
    before_and_now = ({key: fields[key] for key in fields if key in keys} for fields in (saved, wanted))
    return differences(*before_and_now)


def _changes(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return `key BEFORE -> NOW` for each changed key, except keys that were removed or that follow from other keys."""
    changed = [key for key, value in wanted.items() if saved.get(key) != value and key != "pushes"]
    return ", ".join(f"{key} {saved.get(key, 'nothing')} -> {wanted[key]}" for key in changed)


def _optimizer_state(config: JobConfig, why_new: str) -> str:
    policy = config.training.policy
    if policy.sends_steps and policy.outer_step is None:
        return "the optimizer runs in the workers, where its state begins again as after each start"
    return f"the state of the optimizer begins again ({why_new})" if why_new else "so is the state of the optimizer"
