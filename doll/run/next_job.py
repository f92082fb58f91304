"""The job file of a run that is regridded, and what a command does where a regrid was killed.

A regrid writes `job.next.yaml`, then the checkpoint of the new grid, which decides, and then makes `job.next.yaml` the
job file of the run. Where that was not reached, the newest checkpoint says which of both files holds.
"""

from __future__ import annotations

import contextlib

from doll.config import fingerprint, load
from doll.errors import ConfigError
from doll.ledger.snapshot_counts import decode_counts
from doll.process.fault_points import fault_point
from doll.process.files import write_atomically
from doll.run.folder import RunFolder
from doll.storage.stores import open_store


def settle_job_file(run: RunFolder) -> None:
    """Where a regrid of this run was killed, let its folder hold one job file again: that of the newest checkpoint.

    Raises:
        CheckpointError: the checkpoints cannot be read.
        ConfigError: `job.next.yaml` cannot be read.
        OSError: the folder cannot be written.
    """
    if not run.next_job.exists():
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(run.locked())
        except ConfigError:
            return  # the regrid is under way
        settle_locked(run)


def settle_locked(run: RunFolder) -> None:
    """As `settle_job_file`, where this process has locked the folder."""
    if not run.next_job.exists():
        return
    wanted = load(run.next_job)
    checkpoint = open_store(wanted, run.path).load_newest(None)
    saved = {} if checkpoint is None else fingerprint.parse(checkpoint.fingerprint)
    of_job = {key: value for key, value in saved.items() if key not in fingerprint.MODEL_KEYS}
    if checkpoint is not None and of_job == fingerprint.job_fields(wanted):
        counts = decode_counts(checkpoint.state)
        take_next_job(run, 0 if counts is None else len(counts.earlier_grids))
    else:
        run.next_job.unlink()


def take_next_job(run: RunFolder, grid: int) -> None:
    """The newest checkpoint is of grid `grid`: `job.next.yaml` becomes the job file, and the one before is kept."""
    write_atomically(run.path / f"job.grid-{grid - 1}.yaml", run.job.read_bytes())
    fault_point("regrid.after_copy")
    run.next_job.replace(run.job)
    fault_point("regrid.after_job")
