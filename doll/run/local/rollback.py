"""`doll rollback`: training goes on from an earlier version, and what was learned since is learned again or skipped.

Of a run of `doll up`: 1. the folder is locked, and what is wanted is checked; 2. the earlier version is saved once
more, as the newest checkpoint, which decides (`doll.ps.rollback`); 3. as `doll resume`. After a crash at any point the
run can be resumed: where it was until 2 is done, and rolled back from then on.

Of a job whose roles are started one by one, it is checked that no server leads, and the checkpoint is saved. Then its
roles are started as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from doll.run.local.regrid import stopped_job
from doll.run.local.resume import check_same_ledger, on_same_broker, resume_in
from doll.run.local.up import check_runnable
from doll.run.target import Target
from doll.storage.checkpoints import resolve_version
from doll.storage.stores import open_store

if TYPE_CHECKING:
    from doll.ps.rollback import RollbackOutcome


def rollback_run(target: Target, to: str, *, skip: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Roll back the run of `target`, a run folder, and resume it; the report, as `run_up`.

    Args:
        to: `latest`, a number, or an alias.
        skip: what was learned since is not learned again.

    Raises:
        VersionUnknownError: there is no such version, or the run has not gone through it.
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
    """Save the earlier version as the newest checkpoint of a job whose roles run elsewhere, and have ended.

    Raises:
        VersionUnknownError, ConfigError, CheckpointError, ServiceUnavailableError: as `rollback_run`; or a parameter
            server leads.
    """
    version = resolve_version(open_store(target.config, target.run.path), to)
    config, above_term = stopped_job(target, "rollback")
    from doll.ps.rollback import rollback

    return rollback(config, open_store(config, target.run.path), version, skip=skip, above_term=above_term)
