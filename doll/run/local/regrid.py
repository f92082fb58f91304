"""`doll regrid`: continues a job from its newest checkpoint with another batch size, policy or optimizer.

Steps for a run of `doll up`: 1. lock the folder and check the changes; 2. write `job.next.yaml`; 3. save the first
checkpoint of the new grid, from which on the new settings are valid (`doll.ps.regrid`); 4. make `job.next.yaml` the job
file; 5. continue as `doll resume`. After a crash at any point the run can be resumed: before the end of step 3 with the
old settings, afterwards with the new ones (`doll.run.target`).

`doll rollback` continues training from an earlier version. Samples that were learned after this version are learned
again or skipped. In place of steps 2 to 4, the command saves the earlier version again as the newest checkpoint
(`doll.ps.rollback`).

If the roles of a job are started one by one, its job file already has the new settings. The command checks that no
server leads, and saves the checkpoint. Then the roles are started as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from doll.config import JobConfig, load
from doll.errors import ConfigError, DollError, FencedError
from doll.ledger.admission import admit
from doll.process.fault_points import fault_point
from doll.ps.standby import LeaderCheck
from doll.run.folder import RunFolder
from doll.run.local.resume import check_same_ledger, on_same_broker, refuse_new_weights, resume_in, run_resume
from doll.run.local.roles import JobProcess
from doll.run.local.up import check_runnable
from doll.run.policy_choice import parse_choice
from doll.run.target import Target, settle_locked, take_next_job
from doll.storage.checkpoints import resolve_version
from doll.storage.stores import checkpoint_location, open_store

if TYPE_CHECKING:
    from doll.ps.regrid import RegridOutcome
    from doll.ps.rollback import RollbackOutcome

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class NewGrid:
    """The changes that `doll regrid` makes. None: no change."""

    batch_size: int | None = None
    group_size: int | None = None
    policy: str | None = None  # in the form of `doll compare --policies`
    workers: int | None = None
    shards: int | None = None

    def overrides(self, config: JobConfig) -> list[str]:
        """Return the changes as overrides of the job file.

        Raises:
            ConfigError: the policy does not exist.
        """
        changes: list[str] = []
        if self.batch_size is not None:
            changes.append(f"data.batch_size={self.batch_size}")
        if self.policy is not None:
            changes += parse_choice(self.policy).overrides(config.training.policy.name)
        if self.group_size is not None:
            changes.append(f"training.policy.group_size={self.group_size}")
        if self.workers is not None:
            changes.append(f"data.workers={self.workers}")
            if config.data.partitions is None and config.data.topic is None:  # keep the number of partitions
                changes.append(f"data.partitions={config.data.num_partitions}")
        if self.shards is not None:
            changes.append(f"ps.shards={self.shards}")
        return changes


def regrid_run(target: Target, overrides: Sequence[str], new: NewGrid, say: Say) -> dict[str, Any]:
    """Regrid the run of `target`, a run folder, and resume it; return the report, as `run_up`. If only the number of
    shards changes, the run is resumed in its grid.

    Raises:
        ConfigError: the run is still running, nothing is changed, or a change is not possible.
        CheckpointError: its checkpoints cannot be read.
        ServiceUnavailableError: the records of the run are gone, or its services do not answer.
    """
    run = target.run
    config = load(target.path, [*overrides, *new.overrides(target.config)])
    if new.shards is not None and not overrides and new == NewGrid(shards=new.shards):
        return run_resume(run.path, new.overrides(target.config))
    with run.locked():
        check_runnable(config, begins=False)
        if config.ps.shards == "auto":  # the new job file is compared with the checkpoint, which has the number
            from doll.model.flat_model import counted
            from doll.task.base import load_task

            config = counted(config, load_task(config))
        refuse_new_weights(run, config)
        config = on_same_broker(run, config)

        def write_next_job() -> None:
            run.write_job(config, run.next_job)
            fault_point("regrid.after_next_job")

        try:
            result = _regrid(config, run, checked=write_next_job)
        except BaseException:
            with contextlib.suppress(DollError):
                settle_locked(run)
            raise
        take_next_job(run, result.grid)
        say(result.text())
        return resume_in(run, config)


def regrid_deployed(target: Target) -> RegridOutcome:
    """Save the first checkpoint of the new grid, for a job file whose roles run elsewhere and have ended.

    Raises:
        ConfigError: a parameter server leads, there is no checkpoint, or a change is not possible.
        CheckpointError: its checkpoints cannot be read.
        ServiceUnavailableError: Kafka does not answer.
    """
    config, above_term = stopped_job(target, "regrid")
    return _regrid(config, target.run, above_term=above_term)


def stopped_job(target: Target, command: str) -> tuple[JobConfig, int]:
    """Return a job whose roles run elsewhere and have ended, and the highest term in its topics.

    Raises:
        ConfigError: a parameter server leads, or topics and checkpoints belong to different runs.
        CheckpointError: its checkpoints cannot be read.
        ServiceUnavailableError: Kafka does not answer.
    """
    process = JobProcess.alone(target, command, redis="unused", has_checkpoints=True)
    config, services = process.config, process.services
    with LeaderCheck(config, services) as leader_check:
        try:
            leader_check.require_no_leader(lambda: False)
        except FencedError as exc:
            raise ConfigError(
                f"a parameter server leads job {config.job}: expected none during doll {command}; end it first "
                "(SIGTERM), and start it again afterwards with this job file"
            ) from exc
    store = open_store(config, target.run.path)
    lineage = admit(config, services, store, checkpoint_location(config, target.run.path), 0)
    return config, lineage.newest_term


def _regrid(
    config: JobConfig, run: RunFolder, *, above_term: int = 0, checked: Callable[[], object] = lambda: None
) -> RegridOutcome:
    from doll.ps.regrid import regrid

    return regrid(config, open_store(config, run.path), above_term=above_term, checked=checked)


def rollback_run(target: Target, to: str, *, skip: bool, say: Say) -> dict[str, Any]:
    """Roll back the run of `target`, a run folder, and resume it; return the report, as `run_up`.

    Args:
        to: the earlier version: `latest`, a number, or an alias.
        skip: whether the samples that were learned since then are skipped. False: they are learned again.

    Raises:
        VersionUnknownError: the version does not exist, or is not part of the history of the run.
        ConfigError: the run is still running, or the job file does not fit.
        CheckpointError: its checkpoints cannot be read.
        ServiceUnavailableError: the records of the run are gone, or its services do not answer.
    """
    run, config = target.run, target.config
    with run.locked():
        check_runnable(config, begins=False)
        check_same_ledger(run, config)
        store = open_store(config, run.path)
        version = resolve_version(store, to)
        config = on_same_broker(run, config)
        from doll.ps.rollback import rollback

        result = rollback(config, store, version, skip=skip)
        run.write_job(config)
        say(result.text())
        return resume_in(run, config)


def rollback_deployed(target: Target, to: str, *, skip: bool) -> RollbackOutcome:
    """Save the earlier version as the newest checkpoint, for a job whose roles run elsewhere and have ended.

    Raises:
        VersionUnknownError, ConfigError, CheckpointError, ServiceUnavailableError: see `rollback_run`. ConfigError also
            if a parameter server leads.
    """
    version = resolve_version(open_store(target.config, target.run.path), to)
    config, above_term = stopped_job(target, "rollback")
    from doll.ps.rollback import rollback

    return rollback(config, open_store(config, target.run.path), version, skip=skip, above_term=above_term)
