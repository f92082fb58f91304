"""`doll rollback` at the checkpoint store: an earlier version once more, as the newest checkpoint.

What was learned since is left behind, and not deleted: its checkpoints stay as long as others, and its updates stay in
Kafka. The earlier model gets the next number, so that a number never names two models. It begins a grid of its own,
as after `doll regrid` (`doll.ps.regrid`, whose order of effects this has): with the records after the earlier version,
which are learned again, or after the newest one, and then what lies between is skipped (docs/decisions/0090).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        to: the earlier version.
        left: the newest one before.
        version: the number of the earlier one from now on.
        records: that were learned since the earlier version: they are skipped, or learned again.
        optimizer_state: what became of it, for people.
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


def rollback(
    config: JobConfig, store: CheckpointStore, to: int, *, skip: bool, above_term: int = 0,
    checked: Callable[[], object] = lambda: None,
) -> RollbackOutcome:  # fmt: skip
    """Go on from version `to` of `store`. No server may serve the job.

    Args:
        skip: the samples since then are not learned again.
        above_term: the highest term that was seen elsewhere.
        checked: called when everything was checked, and nothing is changed yet.

    Raises:
        VersionUnknownError: `to` is not kept, or was left behind by another rollback.
        ConfigError: it is the newest one, or the job file does not fit it.
        CheckpointError: the store cannot be read or written, or a checkpoint does not fit.
        FencedError: a server has claimed the job meanwhile; it goes on as before.
    """
    torch.set_num_threads(1)
    _begin(config, store, to, skip=skip, term=0)
    checked()
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
    newest, then = store.load_newest(None), store.load_newest(None, to)
    if newest is None or then is None:
        raise VersionUnknownError(f"no checkpoint of job {config.job} in {store.location}: expected one to go back to")
    if newest.version <= to:
        raise ConfigError(f"expected a version before the newest one, {newest.version}, got {to}")
    last, earlier = decode_snapshot(newest), decode_snapshot(then)
    if is_left(last.rollbacks, then.term, then.version, earlier.grid):
        raise VersionUnknownError(
            f"{store.location}: expected a version that the newest one has gone through, got {to}, which was left by a "
            f"rollback ({last.rollbacks[-1].text()}); a new job can begin with it (training.init_from)"
        )
    state = rolled_back(
        earlier, last, config.data.records_per_batch, config.training.policy.name, term=term, skip=skip
    )  # fmt: skip
    checkpoint, optimizer_state = converted(config, store, then, state, term=term, command="doll rollback")
    ends = zip_longest(_ends(earlier), _ends(last), fillvalue=0)
    return checkpoint, RollbackOutcome(
        config.job, to, newest.version, state.version, term, state.grid, state.origins,
        sum(until - begin for begin, until in ends), skip, optimizer_state,
    )  # fmt: skip


def rolled_back(
    earlier: EngineSnapshot, newest: EngineSnapshot, records_per_batch: int, policy: str, *, term: int, skip: bool
) -> EngineSnapshot:
    """The state of `earlier` once more, after that of `newest`, in a grid of its own. Pure.

    Of workers, partitions and time it is that of `newest`, and of the model that of `earlier`. `term`: of the
    checkpoint that this is for. `skip`: the grid begins where `newest` ends.
    """
    version, num = newest.version + 1, len(newest.origins)
    ends = _padded(_ends(earlier), num)
    skipped = tuple(until - end for until, end in zip(_ends(newest), ends, strict=True)) if skip else ()
    # Numbers of grids are not given again either: whoever is of another grid ends (`Welcome.grid`).
    empty = Grid(version=earlier.version, records_per_batch=records_per_batch, origins=ends, applied=(0,) * num)
    grids = [*earlier.earlier_grids, closed(earlier), *[empty] * (newest.grid - earlier.grid)]
    grids[-1] = msgspec.structs.replace(grids[-1], skipped=skipped)
    return msgspec.structs.replace(
        newest,
        version=version,
        records_per_batch=records_per_batch,
        origins=_padded(grids[-1].next_origins, num),
        applied=(0,) * num,
        left_out=(),
        leader_epochs=newest.leader_epochs if skip else _epochs(earlier, num),
        by_worker=(0,) * len(newest.sessions),
        policy=policy,
        policy_state=None,
        earlier_grids=tuple(grids),
        samples_total=earlier.samples_total,
        empty_updates=earlier.empty_updates + version - earlier.version,
        refusals=newest.refusals if skip else earlier.refusals,
        reached=None,  # by weights that are left behind
        rollbacks=(
            *earlier.rollbacks,
            Rollback(to=earlier.version, grid=earlier.grid, version=version, term=term, skipped=skip),
        ),
    )


def _ends(snapshot: EngineSnapshot) -> tuple[int, ...]:
    return closed(snapshot).ends


def _padded(values: Sequence[int], num: int) -> tuple[int, ...]:
    """Partitions that were added later begin at offset 0."""
    return (*values, *[0] * (num - len(values)))


def _epochs(snapshot: EngineSnapshot, num: int) -> tuple[int, ...]:
    known = snapshot.leader_epochs
    return (*known, *[-1] * (num - len(known))) if known else ()
