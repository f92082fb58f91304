"""The job of a command: a job file, the folder of a run, or a shipped example."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from doll.config import JobConfig, fingerprint, load
from doll.errors import ConfigError
from doll.ledger.snapshot_counts import decode_counts
from doll.process.fault_points import fault_point
from doll.process.files import write_atomically
from doll.run import examples
from doll.run.folder import JOB, STACK, RunFolder, cluster_of
from doll.services import Services, resolve
from doll.storage.stores import checkpoint_location, open_store


@dataclass(frozen=True)
class Target:
    """A job, selected on the command line."""

    config: JobConfig
    run: RunFolder
    is_run_folder: bool
    path: Path  # path of the job file

    def services(self, *, needs_redis: bool = True) -> Services:
        """Return the addresses of Kafka and Redis: from the run, otherwise from the job file or the environment.

        Args:
            needs_redis: see `resolve`.

        Raises:
            ConfigError: an address is missing in all of these places.
        """
        recorded = self.run.services() if self.is_run_folder else None
        return recorded if recorded is not None else resolve(self.config, needs_redis=needs_redis)


def refuse_shared_checkpoints(run: RunFolder, config: JobConfig) -> None:
    """Check that a run may change its checkpoints, because no copy of its folder shares them.

    Raises:
        ConfigError: the folder is a copy, and shares checkpoints outside of both folders with the original.
    """
    location = checkpoint_location(config, run.path)
    if run.stack.exists() and not (isinstance(location, Path) and location.is_relative_to(run.path)):
        run.refuse_copy(f"checkpoints, in {location}")


def open_target(path: Path, overrides: list[str], run_folder: Path | None = None) -> Target:
    """Return the job at `path`: a job file, a run folder (or the job file in one), or the name of a shipped example.

    Args:
        run_folder: folder for the files that roles write. None: the run's own folder, otherwise `runs/<job>`.

    Raises:
        ConfigError: there is no job file, or it is not valid.
    """
    if not path.is_file() and not (path / JOB).is_file() and (shipped := examples.named(path)) is not None:
        path = shipped
    if path.is_dir():
        if not (path / JOB).is_file():
            raise ConfigError(f"{path}: expected a job file or a run folder (with a {JOB}), found neither")
        path = path / JOB
    elif not path.exists():
        raise ConfigError(f"cannot read job file {path}: No such file or directory{examples.hint(path)}")
    is_run_folder = (path.parent / STACK).is_file()
    if is_run_folder:
        settle_job_file(RunFolder(path.parent.resolve()))
    config = load(path, overrides)
    if is_run_folder and config.fleet.cluster:
        run = RunFolder(path.parent.resolve())
        if (earlier := run.earlier_place()) is not None and config.fleet.cluster == cluster_of(earlier):
            fleet = config.fleet.model_copy(update={"cluster": cluster_of(run.path)})
            config = config.model_copy(update={"fleet": fleet})
    if run_folder is None:
        run_folder = path.parent.resolve() if is_run_folder else Path("runs") / config.job
    return Target(config, RunFolder(run_folder.resolve()), is_run_folder, path)


def settle_job_file(run: RunFolder) -> None:
    """Restore the job file in the folder of a run whose regrid was killed: the file that fits the newest checkpoint.

    A regrid first writes `job.next.yaml`. Then it saves the checkpoint of the new grid, from which on the new settings
    are valid. Last, it makes `job.next.yaml` the job file of the run.

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
            return  # a regrid is still running
        settle_locked(run)


def settle_locked(run: RunFolder) -> None:
    """Do the work of `settle_job_file` in a folder that this process has locked."""
    if not run.next_job.exists():
        return
    wanted = load(run.next_job)
    checkpoint = open_store(wanted, run.path).load_newest_state()
    saved = {} if checkpoint is None else fingerprint.without_model(fingerprint.parse(checkpoint.fingerprint))
    if checkpoint is not None and saved == fingerprint.job_fields(wanted):
        counts = decode_counts(checkpoint.state)
        take_next_job(run, 0 if counts is None else len(counts.earlier_grids))
    else:
        run.next_job.unlink()


def take_next_job(run: RunFolder, grid: int) -> None:
    """Make `job.next.yaml` the job file, because the newest checkpoint is of `grid`; keep the old job file."""
    write_atomically(run.path / f"job.grid-{grid - 1}.yaml", run.job.read_bytes())
    fault_point("regrid.after_copy")
    run.next_job.replace(run.job)
    fault_point("regrid.after_job")
