"""The job that a command is about: a job file, the folder of a run, or a shipped example."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from doll.config import JobConfig, load
from doll.errors import ConfigError
from doll.run import examples
from doll.run.folder import JOB, STACK, RunFolder
from doll.run.next_job import settle_job_file
from doll.services import Services, resolve


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
    if run_folder is None:
        run_folder = path.parent.resolve() if is_run_folder else Path("runs") / config.job
    return Target(config, RunFolder(run_folder.resolve()), is_run_folder, path)
