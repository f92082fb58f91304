"""The part of `doll rollback` that changes the checkpoint store: it saves an earlier version again as the newest one.

The updates after the earlier version are abandoned and not deleted: their checkpoints are kept as long as others, and
their records stay in Kafka. The earlier model gets the next version number, so a number never means two models. A new
grid begins with this version, as after `doll regrid` (`doll.ps.regrid`; the order of effects is the same). If the grid
begins after the records of the earlier version, later records are learned again. If it begins after the records of the
newest version, the records between the two versions are skipped (docs/decisions/0090).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
import torch

from doll.config import JobConfig
from doll.errors import ConfigError, VersionUnknownError
from doll.process.fault_points import fault_point
from doll.ps.checkpointing import decode_snapshot
from doll.ps.engine.events import EngineSnapshot
from doll.ps.regrid import closed, converted
from doll.records.bounds import Grid
from doll.records.rollbacks import Rollback, is_left
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.telemetry import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class RollbackOutcome:
    """The outcome of a rollback.

    Attributes:
        to: the earlier version, to which the job goes back.
        left: version that was the newest one before the rollback.
        version: new number of the earlier version.
        records: number of records learned since the earlier version, which are skipped or learned again.
        optimizer_state: text that says whether the optimizer's state was kept.
    """

    job: str
    to: int
    left: int
    version: int
    term: int
    grid: int
    origins: tuple[int, ...]
    records: int
    skipped: bool
    optimizer_state: str

    def text(self) -> str:
        what = "are skipped" if self.skipped else "are learned again"
        return (
            f"rolled back {self.job} from version {self.left} to {self.to}, which is version {self.version} now: the "
            f"{self.records} records since then {what}\n"
            f"  it goes on from offsets {', '.join(map(str, self.origins))}; the weights are those of version "
            f"{self.to}; {self.optimizer_state}"
        )


def rollback(config: JobConfig, store: CheckpointStore, to: int, *, skip: bool, above_term: int = 0) -> RollbackOutcome:
    """Make version `to` of `store` the newest version again. No server may serve the job during this call.

    Args:
        skip: True: the samples since version `to` are not learned again.
        above_term: highest term that is known from elsewhere.

    Raises:
        VersionUnknownError: version `to` is not kept, or another rollback has abandoned it.
        ConfigError: version `to` is the newest one, or the job file does not fit it.
        CheckpointError: the store cannot be read or written, or a checkpoint does not fit.
        FencedError: a server has claimed the job during this call. The job continues without the rollback.
    """
    torch.set_num_threads(1)
    _begin(config, store, to, skip=skip, term=0)
    term = store.claim_term(above_term)
    fault_point("rollback.after_claim")
    checkpoint, result = _begin(config, store, to, skip=skip, term=term)
    store.save(checkpoint)
    fault_point("rollback.after_checkpoint")
    log.info("rolled_back", to=to, version=result.version, term=term, grid=result.grid, skipped=skip)
    return result


def _begin(
    config: JobConfig, store: CheckpointStore, to: int, *, skip: bool, term: int
) -> tuple[Checkpoint, RollbackOutcome]:
    newest, then = store.load_newest_state(), store.load_newest(None, to, in_place=True)
    if newest is None or then is None:
        raise VersionUnknownError(f"no checkpoint of job {config.job} in {store.location}: expected one to go back to")
    if newest.version <= to:
        raise ConfigError(f"expected a version before the newest one, {newest.version}, got {to}")
    last, earlier = decode_snapshot(newest), decode_snapshot(then)
    removed = max((item.version for item in last.rollbacks if item.forgot), default=0)
    if to < removed:
        raise ConfigError(
            f"expected version {removed} or a later one, got {to}: version {removed} has removed records from the "
            "model (doll forget), and an earlier version has learned them or would learn them again"
        )
    if is_left(last.rollbacks, then.term, then.version, earlier.grid):
        raise VersionUnknownError(
            f"{store.location}: expected a version that the newest one has gone through, got {to}, which was left by a "
            f"rollback ({last.rollbacks[-1].text()}); a new job can begin with it (training.init_from)"
        )
    state = rolled_back(
        earlier, last, config.data.records_per_batch, config.training.policy.name, term=term, skip=skip
    )  # fmt: skip
    checkpoint, optimizer_state = converted(config, store, then, state, term=term, command="doll rollback")
    ends = zip_longest(closed(earlier).ends, closed(last).ends, fillvalue=0)
    return checkpoint, RollbackOutcome(
        config.job, to, newest.version, state.version, term, state.grid, state.origins,
        sum(until - begin for begin, until in ends), skip, optimizer_state,
    )  # fmt: skip


def rolled_back(
    earlier: EngineSnapshot, newest: EngineSnapshot, records_per_batch: int, policy: str, *, term: int, skip: bool
) -> EngineSnapshot:
    """Return the state of `earlier` as the version after `newest`, in a new grid. Pure.

    The state of workers, partitions and time is taken from `newest`, the state of the model from `earlier`. `term`:
    term of the checkpoint that will hold the state. `skip`: True: the grid begins where `newest` ends.
    """
    version, num = newest.version + 1, len(newest.origins)
    ends = _padded(closed(earlier).ends, num, 0)
    skipped = tuple(until - end for until, end in zip(closed(newest).ends, ends, strict=True)) if skip else ()
    # Grid numbers are not reused either: a process with another grid number ends (`Welcome.grid`).
    empty = Grid(version=earlier.version, records_per_batch=records_per_batch, origins=ends, applied=(0,) * num)
    grids = [*earlier.earlier_grids, closed(earlier), *[empty] * (newest.grid - earlier.grid)]
    grids[-1] = msgspec.structs.replace(grids[-1], skipped=skipped)
    return msgspec.structs.replace(
        newest,
        version=version,
        records_per_batch=records_per_batch,
        origins=_padded(grids[-1].next_origins, num, 0),
        applied=(0,) * num,
        left_out=(),
        leader_epochs=newest.leader_epochs if skip else _padded(earlier.leader_epochs, num, -1),
        by_worker=(0,) * len(newest.sessions),
        policy=policy,
        policy_state=None,
        earlier_grids=tuple(grids),
        samples_total=earlier.samples_total,
        empty_updates=earlier.empty_updates + version - earlier.version,
        refusals=newest.refusals if skip else earlier.refusals,
        reached=None,  # the evaluation measured weights that are abandoned now
        raised_until=0,  # and so did the detector of drift
        rollbacks=(
            *earlier.rollbacks,
            Rollback(to=earlier.version, grid=earlier.grid, version=version, term=term, skipped=skip),
        ),
    )


def _padded(values: Sequence[int], num: int, value: int) -> tuple[int, ...]:
    """Return `values` with `value` for each partition that was added later; () if there are no values."""
    return (*values, *[value] * (num - len(values))) if values else ()
