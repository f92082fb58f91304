"""The job that a command is about: a job file, the folder of a run, or a shipped example."""

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
    """A job, as the command line names it."""

    config: JobConfig
    run: RunFolder
    is_run_folder: bool
    path: Path  # of the job file

    def services(self, *, needs_redis: bool = True) -> Services:
        """The addresses of Kafka and Redis: of the run, else of the job file or the environment.

        Args:
            needs_redis: see `resolve`.

        Raises:
            ConfigError: neither names an address.
        """
        recorded = self.run.services() if self.is_run_folder else None
        return recorded if recorded is not None else resolve(self.config, needs_redis=needs_redis)


def refuse_shared_checkpoints(run: RunFolder, config: JobConfig) -> None:
    """Return if the checkpoints of a run may be changed, as far as its folder is no copy.

    Raises:
        ConfigError: it is one, and its checkpoints are those of the original, outside of both folders.
    """
    location = checkpoint_location(config, run.path)
    if run.stack.exists() and not (isinstance(location, Path) and location.is_relative_to(run.path)):
        run.refuse_copy(f"checkpoints, in {location}")


def open_target(path: Path, overrides: list[str], run_folder: Path | None = None) -> Target:
    """The job at `path`: a job file, a run folder (or the job file in one), or the name of a shipped example.

    Args:
        run_folder: the folder of the files that roles write; default: the run's own folder, else `runs/<job>`.

    Raises:
        ConfigError: there is no job file, or it is wrong.
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
    """Let the folder of a run whose regrid was killed hold one job file again: that of the newest checkpoint.

    A regrid writes `job.next.yaml`, then the checkpoint of the new grid, which decides, and then makes `job.next.yaml`
    the job file of the run.

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
    """See `settle_job_file`; this process has locked the folder."""
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
